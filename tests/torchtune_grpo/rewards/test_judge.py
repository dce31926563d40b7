import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchtune_grpo.rewards import judge
from torchtune_grpo.rewards.judge import compare_math

HOSTILE = [
    r"9^{9^{9}}",
    r"10^{10^{10}}",
    "1000000000!",
    r"\sum_{k=1}^{10^{9}} \frac{1}{k^k}",
    r"\int_0^1 x^{x^{x^x}} dx",
    "(" * 400 + "1" + ")" * 400,
    "-" * 990 + "1",
]


def test_compare_math_tells_equal_from_different():
    assert compare_math("x+1", "1+x", 1.0) is True
    assert compare_math("x+1", "1-x", 1.0) is False
    assert compare_math(r"\frac{", "x", 1.0) is False
    assert compare_math("x", r"\frac{", 1.0) is None


@pytest.mark.parametrize("answer", HOSTILE)
def test_compare_math_survives_hostile_answers(answer):
    assert compare_math(answer, "7", 0.2) is not True
    assert compare_math("a+b", "b+a", 1.0) is True


def test_compare_math_evaluates_no_python(tmp_path):
    target = tmp_path / "touched"
    assert not compare_math(f"__import__('os').mknod('{target}')", "0", 1.0)
    assert not target.exists()


def test_compare_math_is_safe_from_threads():
    cases = [(f"x+{i}", f"{j}+x", i == j) for i in range(4) for j in range(4)]
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda case: compare_math(case[0], case[1], 2.0), cases))
    assert verdicts == [equal for _, _, equal in cases]


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def assert_gone(group: int) -> None:
    deadline = time.monotonic() + 30
    while _alive(group):
        assert time.monotonic() < deadline, "the helper outlived its parent"
        time.sleep(0.05)


def test_helper_dies_with_a_killed_parent():
    script = (
        "from torchtune_grpo.rewards import judge\n"
        "judge.start_judge()\n"
        "print(judge._judge._process.pid, flush=True)\n"
        "judge.compare_math('9^{9^{9}}', '7', 2.0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        group = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    assert_gone(group)


def test_helper_is_replaced_after_it_was_killed():
    script = (
        "import os, signal\n"
        "from torchtune_grpo.rewards import judge\n"
        "judge.start_judge()\n"
        "first = judge._judge._process.pid\n"
        "os.kill(first, signal.SIGSTOP)\n"
        "assert judge.compare_math('x+1', '1+x', 0.1) is None\n"
        "assert judge.compare_math('x+1', '1+x', 2.0) is True\n"
        "os.kill(judge._judge._process.pid, signal.SIGKILL)\n"
        "assert judge.compare_math('x+1', '1+x', 2.0) is True\n"
        "print(judge._judge._process.pid)\n"
    )
    group = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout)
    assert_gone(group)


def test_a_comparison_whose_helper_is_killed_is_made_again(monkeypatch):
    judge.start_judge()
    killed = []

    def read_line(process, timeout_s):
        if not killed:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            raise BrokenPipeError
        return _read_line(process, timeout_s)

    _read_line = judge._read_line
    monkeypatch.setattr(judge, "_read_line", read_line)
    assert compare_math("x+1", "1+x", 2.0) is True
    assert judge._judge._process.pid not in killed


def test_forked_process_starts_a_helper_of_its_own():
    script = (
        "import os\n"
        "from torchtune_grpo.rewards import judge\n"
        "judge.start_judge()\n"
        "if (child := os.fork()) == 0:\n"
        "    os._exit(0 if judge.compare_math('x+1', '1+x', 2.0) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert judge.compare_math('x+1', '1+x', 2.0) is True\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_helper_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    broken = tmp_path / "server.py"
    broken.write_text("import no_such_module_at_all\n")
    monkeypatch.setattr(judge, "_SERVER", broken)
    with pytest.raises(RuntimeError, match="math-verify"):
        judge._Judge().start()


def test_an_interrupted_comparison_does_not_answer_the_next(monkeypatch):
    def interrupt(process, timeout_s):
        raise KeyboardInterrupt

    judge.start_judge()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(judge, "_read_line", interrupt)
        compare_math("x+1", "1+x", 1.0)
    assert compare_math("x+1", "1-x", 1.0) is False
