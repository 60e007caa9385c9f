"""The benchmark of a pretrained model: its arithmetic by hand, its report, its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import real_model
from bench.support import real_model_report


def evaluated(*numbers: int, tasks: int = 100) -> dict[str, bool]:
    return {str(number): number in numbers for number in range(tasks)}


def test_success_before_and_after_by_hand() -> None:
    start = {"evaluations": {"0": evaluated(*range(10)), "60": evaluated(*range(90))}}
    more = {"minutes": 3.5, "cpu_minutes": 6.25, "tokens_per_s": 80.0, "load": [0.1, 0.2]}
    other = {"evaluations": {"60": evaluated(*range(100))}, **more, "minutes": 4.5}
    row = real_model.row_of(start, [{**start, **more}, other])
    assert row["start"] == {"success": 0.1, "low": 0.0552, "high": 0.1744, "tasks": 100}
    assert (row["end"]["success"], row["end"]["tasks"]) == (0.95, 100)
    assert (row["above"], row["minutes"]) == (True, 4.5)
    del other["evaluations"]["60"]["7"]  # a task that was not measured
    assert real_model.row_of(start, [{**start, **more}, other])["end"]["tasks"] == 99
    assert not real_model.row_of(start, [{**more, "evaluations": {"60": evaluated(*range(15))}}])[
        "above"
    ]


def test_a_recipe_of_the_same_start_does_not_measure_it_again() -> None:
    options = real_model.argparse.Namespace(recipes=["additions", "lora"], tiny=False, model="m")
    has_start = {
        (name, seed): "eval.at_start=true" in real_model.overrides_of(name, seed, options)
        for name, seed in [("additions", 0), ("additions", 1), ("lora", 0), ("words", 0)]
    }
    assert has_start == {
        ("additions", 0): True,
        ("additions", 1): False,
        ("lora", 0): False,
        ("words", 0): True,
    }
    options.recipes = ["lora"]
    assert "eval.at_start=true" in real_model.overrides_of("lora", 0, options)
    assert "model.path=m" in real_model.overrides_of("lora", 0, options)


def test_the_report_changes_only_what_is_between_its_marks(tmp_path: Path) -> None:
    (tmp_path / "learning.md").write_text(
        f"before\n{real_model_report.BEGIN}\nold\n{real_model_report.END}\nafter\n"
    )
    run = {"curve": [0.1, 0.5, 0.9]}
    row = {
        "start": {"success": 0.1, "low": 0.05, "high": 0.2, "tasks": 500},
        "end": {"success": 0.9, "low": 0.85, "high": 0.95, "tasks": 500},
        "minutes": 7.25,
        "cpu_minutes": 14.0,
    }
    real_model_report.write(
        tmp_path, {"additions": row, "words": row}, {"additions": [run, run], "words": [run]}
    )
    text = (tmp_path / "learning.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert (
        "| two-digit additions | 0.100 (0.050-0.200) | 0.900 (0.850-0.950) | 500 | 2 | 7.2 |"
        in text
    )
    assert "![](real-model.png)" in text
    assert "old" not in text
    assert (tmp_path / "real-model.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--recipes", "additions,subtractions"],
            "argument --recipes/--only: 'subtractions' is not allowed; one of add",
        ),
        (["--seeds", "0"], "argument --seeds: '0' is not allowed; a whole number of at least 1"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        real_model.main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_without_the_model_one_line_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert real_model.main(["--model", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    line = f"error: {tmp_path / 'none'}: no model there; `make real-model` writes models/smollm2-135m-instruct\n"
    assert capsys.readouterr().err == line
