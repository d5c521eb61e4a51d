"""`unidist.launch`: a function on fresh processes, from scripts, modules and notebooks."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from launch_support import Ended, Place


def python(place: Place, body: str, *how: str) -> Ended:
    """Run `body` as a script that begins with the imports below."""
    return place.end(start(place, body, *how))


def start(place: Place, body: str, *how: str) -> subprocess.Popen[str]:
    head = """\
        import os, sys, time
        from unidist.errors import LaunchError, UsageError
        from unidist.launch.inline import launch
        def leave():
            open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()
    """
    text = textwrap.dedent(head) + textwrap.dedent(body)
    (place.path / "caller.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, *(how or ("caller.py",))],
        env=place.env,
        cwd=place.path,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_results_by_rank_and_output_of_all(place: Place) -> None:
    ended = python(
        place,
        """
        class Thing:
            def __init__(self, value): self.value = value
        def work(thing, factor):
            print("in here")
            return Thing(thing.value + factor * int(os.environ["RANK"]))
        if __name__ == "__main__":
            print([thing.value for thing in launch(work, 3, "plain", (Thing(5), 10), depth=2)])
        """,
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "[5, 15, 25]"
    assert ended.out.count("] in here") == 3


def test_a_function_of_a_module(place: Place) -> None:
    (place.path / "elsewhere.py").write_text("import os\ndef work(): return os.environ['UNIDIST_WORLD_SIZE']\n")
    ended = python(place, "import elsewhere; print(launch(elsewhere.work, 2, 'plain'))")
    assert ended.out == "['2', '2']\n", ended.err


def test_a_script_without_a_guard_is_told(place: Place) -> None:
    ended = python(place, "def work(): return 1\nlaunch(work, 2, 'plain')")
    assert ended.code == 1
    assert 'put that under if __name__ == "__main__":' in ended.err


def test_run_as_a_module(place: Place) -> None:
    body = "def work(): return 1\nif __name__ == '__main__': print(launch(work, 2, 'plain'))"
    assert python(place, body, "-m", "caller").out == "[1, 1]\n"


def test_closures_and_notebooks_travel_by_value(place: Place) -> None:
    ended = python(place, "base = 40\nif __name__ == '__main__': print(launch(lambda: base + 2, 2, 'plain'))")
    assert ended.out == "[42, 42]\n", ended.err
    typed = "from unidist.launch.inline import launch\ndef f(x): return x + 1\nprint(launch(f, 2, 'plain', (1,)))"
    assert python(place, "", "-c", typed).out == "[2, 2]\n"


def test_the_first_cause_is_in_the_error(place: Place) -> None:
    ended = python(
        place,
        """
        def work():
            leave()
            if os.environ["RANK"] == "1": raise ValueError("deep inside")
            time.sleep(600)
        if __name__ == "__main__":
            try: launch(work, 2, "plain")
            except LaunchError as error: print(error)
        """,
    )
    assert ended.code == 0, ended.err
    assert ended.out.startswith("worker 1 on ")
    assert "ValueError: deep inside" in ended.out


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("launch(print, 0, 'plain')", "nproc is 0, it must be a whole number from 1"),
        ("launch(print, '2', 'plain')", "nproc is '2'"),
        ("launch(print, 2.0, 'plain')", "nproc is 2.0"),
        ("launch(print, True, 'plain')", "nproc is True"),
        ("launch(print, 2, 'plain', timeout='x')", "timeout is 'x', it must be a number above 0"),
        ("launch(print, 2, 'plain', timeout=-1)", "timeout is -1"),
        ("launch(print, 2, 'plain', timeout=float('nan'))", "timeout is nan"),
        ("launch(print, 2, 'plain', args=3)", "args is 3, it must be a tuple or list"),
        ("launch(print, 2, 'plain', args='ab')", "args is 'ab', it must be a tuple or list"),
        ("launch(print, 2, 'plain', quiet='no')", "quiet is 'no', it must be true or false"),
        ("launch(5, 2, 'plain')", "takes a function as its first argument, not 5"),
        ("launch(print, 2, 'plain', dpeth=1)", "Did you mean 'depth'?"),
        ("launch(os._exit, 1, 'plain', (0,))", "before the function returned"),
    ],
)
def test_what_cannot_work_is_said(place: Place, call: str, says: str) -> None:
    ended = python(place, f"try: {call}\nexcept (LaunchError, UsageError) as error: print(error)")
    assert says in ended.out, ended.err
    assert ended.err == ""  # no process was started, or none had anything to say


def test_a_result_that_cannot_be_sent_back_is_one_clear_error(place: Place) -> None:
    ended = python(
        place,
        """
        def h(): return lambda: 1
        if __name__ == "__main__":
            try: launch(h, 2, "plain")
            except LaunchError as error: print(error)
        """,
    )
    assert ended.out.startswith("the result of h cannot be sent back: return numbers, strings, numpy arrays, or"), ended
    assert len(ended.out.splitlines()) == 1
    assert ended.err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_caller_leaves_nothing_behind(place: Place, number: signal.Signals) -> None:
    body = """
        import subprocess
        def work():
            leave()
            nap = "import os, time; open(os.environ['PIDS'] + f'/{os.getpid()}', 'w'); time.sleep(600)"
            subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)
            time.sleep(600)
        if __name__ == "__main__":
            launch(work, 2, "plain")
        """
    process = start(place, body)
    place.wait_for_pids(4)
    process.send_signal(number)
    ended = place.end(process)
    assert ended.code != 0
    place.all_gone()
