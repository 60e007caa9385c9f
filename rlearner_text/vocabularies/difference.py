"""Compares the vocabularies of two tokenizers."""

from __future__ import annotations

from rlearner_text.tokenizer import Tokenizer


def vocabulary_difference(student: Tokenizer, teacher: Tokenizer) -> str:
    """Return the first token whose id differs, in words; empty if the vocabularies are equal."""
    student_ids = student.vocabulary()
    teacher_ids = teacher.vocabulary()
    if student_ids == teacher_ids:
        return ""
    differences = student_ids.items() ^ teacher_ids.items()
    token = min(differences, key=lambda item: (item[1], item[0]))[0]
    teacher_id = teacher_ids.get(token, "unknown")
    student_id = student_ids.get(token, "unknown")
    return f"token {token!r} is {teacher_id} there, {student_id} here"
