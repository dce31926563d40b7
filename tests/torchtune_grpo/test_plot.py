import json
from pathlib import Path

import pytest

from torchtune_grpo.plot import draw, main, read_run, series

LINES = [
    {"step": 0, "time_s": 0.0, "eval/held_out/pass@1": 0.25, "eval/held_out/pass@1_stderr": 0.02},
    {"step": 1, "time_s": 30.0, "reward": 0.5, "success": 0.4},
    {"step": 2, "time_s": 90.0, "reward": None, "success": 0.6},
    {"step": 2, "time_s": 120.0, "eval/held_out/pass@1": 0.75},
]


def write_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return folder


def test_series_leaves_out_lines_without_a_value():
    assert series(LINES, "success", "step") == ([1, 2], [0.4, 0.6])
    assert series(LINES, "reward", "time_s") == ([30.0], [0.5])


def test_draw_shows_success_and_reward_against_steps_and_minutes():
    figure = draw({"a": LINES})
    success, success_time, reward, reward_time = figure.axes
    assert [list(line.get_xydata().flatten()) for line in success.lines[:1]] == [[1, 0.4, 2, 0.6]]
    assert [list(line.get_xydata().flatten()) for line in success_time.lines[:1]] == [[0.5, 0.4, 1.5, 0.6]]
    assert list(reward.lines[0].get_xydata().flatten()) == [1, 0.5]
    assert list(reward_time.lines[0].get_xydata().flatten()) == [0.5, 0.5]
    assert (success_time.get_xlabel(), reward.get_xlabel(), reward_time.get_xlabel()) == (
        "",
        "optimizer step",
        "minutes",
    )


def test_draw_shows_pass_at_1_with_its_standard_error():
    bars = draw({"a": LINES}).axes[0].containers[0]
    assert bars.get_label() == "a: held_out pass@1"
    segments = bars.lines[2][0].get_segments()
    assert [[list(point) for point in segment] for segment in segments] == [
        [[0, pytest.approx(0.23)], [0, pytest.approx(0.27)]],
        [[2, 0.75], [2, 0.75]],
    ]


def test_draw_gives_each_run_its_colour():
    panel = draw({"a": LINES, "b": LINES}).axes[2]
    assert [line.get_color() for line in panel.lines] == ["C0", "C1"]


def test_main_writes_one_picture_of_several_runs(tmp_path: Path):
    runs = [str(write_run(tmp_path / name)) for name in "ab"]
    main([*runs, "--out", str(tmp_path / "pictures" / "both.png")])
    assert (tmp_path / "pictures" / "both.png").read_bytes().startswith(b"\x89PNG")
    main(runs)
    assert (tmp_path / "a" / "learning_curve.png").exists()


def test_main_explains_a_folder_without_metrics(tmp_path: Path):
    run = write_run(tmp_path / "runs" / "a")
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "runs")])
    assert "expected a run's output_dir with a metrics.jsonl in it" in stopped.value.code
    assert str(run) in stopped.value.code


def test_read_run_leaves_out_a_line_cut_short(tmp_path: Path):
    run = write_run(tmp_path / "a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert read_run(run) == LINES
