"""The matrix of families in small: the same code as ``python -m bench.families``, on a few of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.families import docs, vllm
from bench.families.architectures import configuration
from bench.families.pool import Job, run_jobs
from bench.families.program_checks import COMMANDS, Answer
from bench.families.summary import Summary, figures, matrix_of, row_of
from bench.families.table import ARCHITECTURES
from bench.families.verdicts import CELLS, Verdict
from rlearner_text import families
from rlearner_text.families import Matrix, read_matrix

LLAMA = next(each for each in ARCHITECTURES if each.name == "llama")


def test_document_is_up_to_date() -> None:
    assert docs.TARGET.read_text(encoding="utf-8") == docs.render(), (
        "run `python -m bench.families.docs`"
    )


def test_every_architecture_has_a_row() -> None:
    rows = read_matrix().families
    assert [row.name for row in rows] == [each.name for each in ARCHITECTURES], (
        "run `python -m bench.families --write`"
    )
    assert {tuple(cell for cell in row.cells if cell != vllm.COLUMN) for row in rows} == {
        tuple(CELLS)
    }
    assert [dict(row.when) for row in rows] == [dict(each.when) for each in ARCHITECTURES]


@pytest.mark.timeout(600)
def test_few_families_run() -> None:
    """A window, experts, and one that engine hf cannot run."""
    command = [sys.executable, "-m", "bench.families", "mistral", "qwen3_moe", "gptj"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(docs.__file__).parents[2], check=False
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["families"], found["wrong"], found["refused_late"], found["needless"]) == (
        3,
        0,
        0,
        0,
    ), done.stdout
    assert found["missing"] == 0
    assert done.returncode == 0


def _verdict(
    cell: str, outcome: str = "works", reason: str = "", dtype: str = "float32"
) -> Verdict:
    return Verdict("llama", dtype, cell, outcome, reason)  # type: ignore[arg-type]


def _answers(code: int = 0, line: str = "") -> dict[str, Answer]:
    return dict.fromkeys(COMMANDS, Answer(code, line))


def test_accepted_cell_that_differs_is_wrong() -> None:
    verdicts = [_verdict("padded", "wrong", "logprobs differ by 2", "bfloat16")]
    row, summary = row_of(LLAMA, verdicts), Summary()
    assert row.cells["padded"] == "bfloat16: logprobs differ by 2"
    summary.judge(row, verdicts, _answers())
    assert len(summary.wrong) == len(COMMANDS)
    assert figures([row], [LLAMA], summary)["missing_names"] == ["llama"]


def test_refusal_counts_only_with_its_reason() -> None:
    verdicts = [_verdict("engine", "refused", "no slots")]
    row = row_of(LLAMA, verdicts)
    late, said = Summary(), Summary()
    late.judge(row, verdicts, _answers(2, "model.path: something else"))
    said.judge(
        row,
        verdicts,
        {
            **_answers(2, "rollout.engine: no slots"),
            "sft": Answer(0, ""),
            "sft packed": Answer(0, ""),
        },
    )
    assert [line.split(":")[0] for line in late.refused_late] == [
        "llama, run",
        "llama, run with lora",
        "llama, plan",
    ]
    assert len(late.needless) == 2
    assert said == Summary()


def test_rows_that_were_not_run_stay() -> None:
    before = Matrix(
        "5.0", [row_of(LLAMA, [_verdict("plan", "broken", "x")]), row_of(ARCHITECTURES[1], [])]
    )
    after = matrix_of([row_of(LLAMA, [])], before)
    assert [row.name for row in after.families] == ["llama", ARCHITECTURES[1].name]
    assert after.families[0].cells["plan"] == "works"


def test_column_of_vllm_stays_when_the_others_are_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = row_of(ARCHITECTURES[1], [])
    file = tmp_path / "families.json"
    file.write_bytes(msgspec.json.encode(Matrix("5.0", [row_of(LLAMA, []), other])))
    monkeypatch.setattr(families, "FILE", file)
    monkeypatch.setattr(docs, "TARGET", tmp_path / "models.md")
    families.read_matrix.cache_clear()
    try:
        vllm.add_column({"llama": "no kernel"})
        before = families.read_matrix()
    finally:
        families.read_matrix.cache_clear()
    again = matrix_of([row_of(LLAMA, [_verdict("plan")], before)], before)
    assert [row.cells.get(vllm.COLUMN) for row in again.families] == ["no kernel", None]
    page = docs.render(again)
    assert f"| llama | {'yes | ' * 8}no |" in page
    assert f"| llama, tied | {'yes | ' * 8}- |" in page
    assert "- llama, vllm: no kernel" in page


def test_wide_heads_have_a_rotary_factor_for_two_elements() -> None:
    (longrope,) = (each for each in ARCHITECTURES if each.name == "phi3.longrope")
    rope = vllm.widen(longrope).settings["rope_parameters"]
    assert [len(rope[name]) for name in ("short_factor", "long_factor")] == [16, 16]
    config = configuration(vllm.widen(longrope), 1, 2, vllm.WIDE)
    assert (config.hidden_size, config.hidden_size // config.num_attention_heads) == (128, 32)
    assert configuration(longrope, 1, 2).hidden_size == 64


def test_crash_costs_one_cell() -> None:
    def run(job: Job, cell: str) -> dict[str, object]:
        if cell == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"cell": cell, "text": job.subject}

    jobs = [Job(name, ["first", "deadly", "last"]) for name in ("a", "b")]
    crash = lambda job, cell, reason: {"cell": cell, "text": job.subject, "reason": reason}  # noqa: E731
    found = sorted(
        run_jobs(jobs, run, crash, 2), key=lambda answer: (answer["text"], answer["cell"])
    )
    assert [(each["text"], each["cell"], each.get("reason")) for each in found] == [
        (name, cell, "its process ended with signal 9" if cell == "deadly" else None)
        for name in ("a", "b")
        for cell in ("deadly", "first", "last")
    ]
