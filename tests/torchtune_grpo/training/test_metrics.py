import json
import math
import struct
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.failures import RunError
from torchtune_grpo.training.metrics import MetricLog, MetricSums, read_metrics
from torchtune_grpo.training.progress import progress_bar

LOGGING = "torchtune.training.metric_logging"


def test_reduce_divides_the_sums_by_the_counts():
    sums = MetricSums()
    sums.add("loss", torch.tensor(3.0), torch.tensor(2))
    sums.add("loss", 1.0, 6)
    sums.add_all({"kl": (torch.tensor(1.0), torch.tensor(4))})
    assert sums.reduce() == {"kl": 0.25, "loss": 0.5}


def test_reduce_leaves_out_what_was_never_counted():
    sums = MetricSums()
    sums.add("judged", torch.tensor(0.0), torch.tensor(0))
    assert sums.reduce() == {}


def test_reduce_starts_afresh():
    sums = MetricSums()
    sums.add("loss", 5.0, 1)
    sums.maximum("length", 9)
    sums.reduce()
    sums.add("loss", 1.0, 1)
    assert sums.reduce() == {"loss": 1.0}


def test_reduce_leaves_out_the_extremes_of_nothing():
    sums = MetricSums()
    for value in (torch.tensor(math.inf), torch.tensor(2.5), 4.0):
        sums.minimum("least", value)
        sums.maximum("greatest", -value)
    sums.minimum("of_nothing", math.inf)
    assert sums.reduce() == {"least": 2.5, "greatest": -2.5}


def test_add_keeps_a_float32_sum_to_float64_precision():
    sums = MetricSums()
    sums.add("tokens", torch.tensor(2.0**24), 1)
    sums.add("tokens", torch.tensor(1.0), 0)
    assert sums.reduce() == {"tokens": 2.0**24 + 1}


def test_add_holds_no_graph():
    sums = MetricSums()
    sums.add("loss", torch.ones(1, requires_grad=True).sum(), 1)
    assert sums.reduce() == {"loss": 1.0}


def test_state_is_taken_up_with_what_was_added_since_by_several_ranks():
    parts = []
    for value in (2.0, 8.0):
        sums = MetricSums()
        sums.add("loss", value, 1)
        sums.minimum("least", value)
        sums.maximum("greatest", value)
        parts.append(sums.state())
        sums.add("loss", 100.0, 1)  # after the state was taken
    merged = MetricSums()
    for state in parts:
        merged.merge(state)
    merged.add("loss", 5.0, 1)
    assert merged.reduce() == {"loss": 5.0, "least": 2.0, "greatest": 8.0}


def _uneven_metrics(rank: int) -> dict[str, float]:
    sums = MetricSums()
    sums.add("reward", *[(6.0, 3), (2.0, 1)][rank])
    if rank == 1:
        sums.add("only_here", 5.0, 2)
    sums.minimum("shortest", [4, 7][rank])
    sums.maximum("longest", [4, 7][rank])
    sums.maximum("only_there", 1.5) if rank == 0 else None
    return sums.reduce()


def test_reduce_over_ranks_whose_names_and_counts_differ():
    expected = {"longest": 7.0, "only_here": 2.5, "only_there": 1.5, "reward": 2.0, "shortest": 4.0}
    assert run_ranks(_uneven_metrics) == [expected, expected]


def write_steps(folder: Path, steps: range, *, resumed_step: int | None = None) -> None:
    log = MetricLog(folder, is_main=True, resumed_step=resumed_step)
    for step in steps:
        log.log(step, {"reward": step / 10})
        log.log_table(step, ["question", "completion"], [[f"q{step}", "c"]])
    log.close()


def without_time(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "time_s"} for line in read_metrics(folder / "metrics.jsonl")]


def test_log_writes_a_line_a_step_at_once(tmp_path: Path):
    log = MetricLog(tmp_path, is_main=True)
    log.log(1, {"reward": 0.5, "ratio": math.nan})
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line.pop("time_s") >= 0
    assert line == {"step": 1, "reward": 0.5, "ratio": None}


def test_log_of_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path):
    write_steps(tmp_path / "whole", range(1, 6))
    write_steps(tmp_path / "parts", range(1, 5))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rewa')  # killed while writing
    write_steps(tmp_path / "parts", range(3, 6), resumed_step=2)
    assert without_time(tmp_path / "parts") == without_time(tmp_path / "whole")
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("parts", "whole")]
    assert samples[0] == samples[1]


def test_log_drops_what_was_written_after_the_checkpoint_at_its_own_step(tmp_path: Path):
    log = MetricLog(tmp_path, is_main=True)
    for step in (1, 2):
        log.log(step, {"loss": 1.0})
    lines = dict(log.lines)
    log.log(2, {"eval/pass@1": 0.5})
    log.close()
    resumed = MetricLog(tmp_path, is_main=True, resumed_step=2, resumed_lines=lines)
    assert [set(line) for line in without_time(tmp_path)] == [{"step", "loss"}] * 2
    resumed.log(2, {"eval/pass@1": 0.5})
    assert resumed.lines == {"metrics.jsonl": 3, "samples.jsonl": 0}


def test_log_time_goes_on_where_the_resumed_run_stopped(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_s": 1000.0}\n{"step": 2, "time_s": 5000.0}\n')
    write_steps(tmp_path, range(2, 3), resumed_step=1)
    assert 1000 <= read_metrics(tmp_path / "metrics.jsonl")[-1]["time_s"] < 5000


def test_log_of_a_fresh_run_keeps_nothing_of_an_older_one(tmp_path: Path):
    write_steps(tmp_path, range(1, 4))
    write_steps(tmp_path, range(7, 8))
    assert [line["step"] for line in without_time(tmp_path)] == [7]


def test_log_writes_nothing_on_other_ranks(tmp_path: Path):
    log = MetricLog(tmp_path / "run", is_main=False, loggers=[{"_component_": "not.imported"}])
    log.log(1, {"reward": 1.0})
    log.log_table(1, ["a"], [["b"]])
    log.close()
    assert not (tmp_path / "run").exists()


def test_log_prints_the_chosen_scalars_and_shortened_samples(tmp_path: Path, capsys):
    log = MetricLog(tmp_path, is_main=True, console=["success", "absent", "reward"])
    log.log(3, {"reward": 0.123456, "success": 0.5, "lr": 1.0})
    log.log_table(3, ["question", "completion"], [["1+1?\n", "x" * 500]])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 3 | success 0.5 | reward 0.1235"
    assert second.startswith("sample at step 3 | question: 1+1? | completion: xxx") and len(second) < 250
    (row,) = read_metrics(tmp_path / "samples.jsonl")
    assert row == {"step": 3, "question": "1+1?\n", "completion": "x" * 500}


def test_log_reaches_tensorboard(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    node = {
        "_component_": f"{LOGGING}.TensorBoardLogger",
        "log_dir": str(tmp_path / "tb"),
        "organize_logs": False,
    }
    log = MetricLog(tmp_path, is_main=True, loggers=[node])
    log.log(1, {"reward": 0.25})
    log.log(2, {"reward": 0.5})
    log.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Tensors("reward")
    assert [(e.step, e.tensor_proto.float_val[0]) for e in events] == [(1, 0.25), (2, 0.5)]


def read_wandb(folder: Path) -> list:
    """The records of an offline run: a LevelDB log (7 bytes of file header, then blocks of 32 KiB)."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts, records = path.read_bytes(), 7, b"", []
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no chunk starts in the last bytes of a block
            at += 32768 - at % 32768
            continue
        _checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def wandb_history(records: list) -> list[dict[str, str]]:
    return [
        {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]


def test_log_reaches_wandb_offline_tables_and_config_included(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    node = {"_component_": f"{LOGGING}.WandBLogger", "project": "test", "log_dir": str(tmp_path)}
    log = MetricLog(tmp_path, is_main=True, loggers=[node], config={"output_dir": str(tmp_path), "seed": 17})
    log.log(4, {"reward": 0.25})
    log.log_table(4, ["question", "reward"], [["1+1?", 1.0]])
    log.close()
    deadline = time.monotonic() + 30  # W&B's own process writes the file
    while len(logged := wandb_history(records := read_wandb(tmp_path))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert any(row.get("reward") == "0.25" and row.get("global_step") == "4" for row in logged)
    assert any(name.startswith("samples") and "table" in value for row in logged for name, value in row.items())
    updates = [item for record in records if record.HasField("config") for item in record.config.update]
    assert ("seed", "17") in [(item.key or "/".join(item.nested_key), item.value_json) for item in updates]


class BrokenLogger:
    """Fails from its second call on."""

    calls = 0

    def log_dict(self, payload, step):
        BrokenLogger.calls += 1
        if BrokenLogger.calls > 1:
            raise ConnectionError("tracker is down")

    def close(self):
        raise AssertionError("a logger that failed is left alone")


def refusing_logger():
    raise ValueError("no such project")


def test_log_warns_once_of_a_failing_logger_and_goes_on(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(BrokenLogger, "calls", 0)
    nodes = [{"_component_": f"{__name__}.{name}"} for name in ("BrokenLogger", "refusing_logger")]
    with pytest.warns(UserWarning, match="refusing_logger failed .*no such project"):
        log = MetricLog(tmp_path, is_main=True, loggers=nodes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            log.log(step, {"reward": 1.0})
        log.close()
    assert [str(w.message).split(" and is")[0] for w in caught] == ["metric logger BrokenLogger failed"]
    assert BrokenLogger.calls == 2
    assert [line["step"] for line in without_time(tmp_path)] == [1, 2, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("name", ["metrics", "samples"])
def test_a_full_disk_ends_the_run_and_names_the_file(tmp_path: Path, monkeypatch, name: str):
    log = MetricLog(tmp_path, is_main=True)
    full = open("/dev/full", "a")
    monkeypatch.setattr(log, f"_{name}_file", full)
    with pytest.raises(RunError, match="^/dev/full: cannot be written: .*No space left.*launch again"):
        log.log(1, {"reward": 0.5}) if name == "metrics" else log.log_table(1, ["a"], [["b"]])
    with suppress(OSError):  # what could not be written is tried once more
        full.close()


@pytest.mark.parametrize(("rank", "terminal", "shown"), [(0, True, True), (1, True, False), (0, False, False)])
def test_progress_bar_shows_only_on_the_terminal_of_rank_0(monkeypatch, capsys, rank, terminal, shown):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    assert list(progress_bar(range(3), "rollout")) == [0, 1, 2]
    assert ("rollout" in capsys.readouterr().err) is shown
