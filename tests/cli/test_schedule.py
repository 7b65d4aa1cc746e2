"""``boltmesh schedule``: the picture, what stands below it, JSON, and what is refused."""

import json
import re
import subprocess
import sys

import pytest

from boltmesh import cli
from boltmesh.strategies.pipeline.schedules.registry import schedules


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def schedule(capsys, name, *arguments, stages=4, microbatches=8):
    sizes = ["--stages", str(stages), "--microbatches", str(microbatches)]
    assert cli.run_command(["schedule", name, *sizes, *arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys, *arguments):
    code = cli.run_command(["schedule", *arguments])
    return code, capsys.readouterr().err


def test_1f1b_is_drawn_to_scale(capsys):
    """100 columns without the 16 of a name hold 12 times of 7 cells."""
    lines = schedule(capsys, "1f1b", "--ascii", stages=2, microbatches=3).splitlines()
    assert lines[0] == (
        "1f1b: 2 stages on 2 ranks, 3 microbatches; through a stage, forward 1 and backward 2"
    )
    f = [f"{at}------" for at in range(3)]
    b = [f"{at}=============" for at in range(3)]
    idle = "......."
    first = [f[0], f[1], idle, idle, b[0], f[2], b[1], idle, b[2]]
    last = [idle, f[0], b[0], f[1], b[1], f[2], b[2], idle, idle]
    assert lines[2] == "rank 0  stage 0 " + "".join(first)
    assert lines[3] == "rank 1  stage 1 " + "".join(last)
    assert lines[4] == " " * 16 + "".join(str(at).ljust(7) for at in range(12)).rstrip()


def test_what_it_costs_stands_below(capsys):
    shown = schedule(capsys, "1f1b")
    assert "bubble       27.3% of total, 37.5% of ideal (idle/busy)" in shown
    assert "peak live    4, 3, 2, 1 activations by rank, each of a microbatch in a stage\n" in shown
    assert "stages       4, 1 on each rank\n" in shown
    assert "next         zero_bubble computes gradients of weights in the gaps: 11.1%" in shown
    shown = schedule(capsys, "zbv")
    assert "bubble       5.9% of total, 6.3% of ideal" in shown
    assert "peak live    8, 8, 8, 8 activations by rank" in shown
    assert "stages       8, 2 on each rank; rank 0 has 0, 7" in shown


def test_blocks_need_no_colour(capsys):
    shown = schedule(capsys, "zero_bubble", "--ascii")
    assert shown.isascii()
    for sign, word in (("--", "forward"), ("++", "input gradient"), ("##", "weight gradient")):
        assert f"{sign} {word}" in shown
    assert "digits: microbatch" in shown


def test_stages_are_named_where_blocks_have_room(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    shown = schedule(capsys, "interleaved_1f1b")
    assert "digits: stage.microbatch" in shown
    assert "rank 0  stages 0,4 0.0" in shown


@pytest.mark.parametrize("name", schedules())
@pytest.mark.parametrize("width", [20, 40, 80, 160, 400])
def test_every_width_holds_the_picture(capsys, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for sizes in ({"stages": 1, "microbatches": 2}, {"stages": 6, "microbatches": 24}):
        shown = schedule(capsys, name, **sizes)
        assert max(map(len, shown.splitlines())) <= width
        if schedules()[name].note:
            assert "note" in shown


def test_a_picture_that_is_cut_says_what_the_whole_needs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = schedule(capsys, "gpipe", microbatches=32)
    at, whole, needed = re.findall(r"Cut at (\d+) of (\d+): the whole needs (\d+) col", shown)[0]
    assert int(whole) == 3 * 35
    assert int(at) == (80 - len("rank 0  stage 0 ")) // 3
    monkeypatch.setenv("COLUMNS", str(int(needed) - 1))
    assert "Cut" in schedule(capsys, "gpipe", microbatches=32)
    monkeypatch.setenv("COLUMNS", needed)
    assert "Cut" not in schedule(capsys, "gpipe", microbatches=32)


@pytest.mark.parametrize("times", [("0.001", "0.0023"), ("1", "1"), ("3", "7"), ("1e6", "2e6")])
def test_times_change_the_picture_and_the_bubble(capsys, times):
    forward, backward = times
    arguments = ("--forward", forward, "--backward", backward)
    found = json.loads(schedule(capsys, "zero_bubble", *arguments, "--json"))
    each, half = float(forward), float(backward) / 2
    wait = 3 * max(each, half)
    busy = 8 * (each + 2 * half)
    assert found["window"] == pytest.approx(busy + wait)
    shown = schedule(capsys, "zero_bubble", *arguments)
    assert f"forward {each:g} and backward {2 * half:g}" in shown


def test_json_has_the_timeline(capsys):
    found = json.loads(schedule(capsys, "dualpipev", "--json", stages=2, microbatches=4))
    assert (found["schedule"], found["ranks"], found["stages"]) == ("dualpipev", 2, 4)
    assert found["rank_of_stage"] == [0, 1, 1, 0]
    assert found["peak_live_activations"] == [5, 5]
    work = [slot["end"] - slot["start"] for row in found["timeline"] for slot in row]
    assert sum(work) == 2 * 4 * 2 * 3
    assert found["bubble"] == pytest.approx(1 - sum(work) / (2 * found["window"]))
    assert found["note"].startswith("a forward and a backward that may run side by side")


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("1f1b", {"stages": 1}, "One rank never waits. Take --stages 2"),
        ("gpipe", {}, "1f1b waits as long, and keeps 4 activations at most instead of 8."),
        ("gpipe", {"microbatches": 4}, "zero_bubble .* 20.0% bubble."),
        ("looped_bfs", {}, "interleaved_1f1b waits as long, and keeps 11 .* instead of 16."),
        ("looped_bfs", {"microbatches": 9}, "--microbatches 18: 7.7% bubble"),
        ("interleaved_1f1b", {}, "zero_bubble .* 5.9% bubble."),
        ("zero_bubble", {}, "zbv .* 5.9% bubble."),
        ("zbv", {}, "--microbatches 16: 3.0% bubble"),
        ("1f1b", {"microbatches": 9}, "--microbatches 18: 14.3% bubble"),
        ("pipedream_2bw", {}, "Its weights .* compare its loss with that of 1f1b"),
    ],
)
def test_the_last_line_says_what_to_try(capsys, name, sizes, said):
    last = schedule(capsys, name, **sizes).splitlines()[-1]
    assert re.search(f"next +{said}", last), last


def test_what_is_said_to_be_better_is(capsys):
    """The advice is a formula; the command draws the other schedule by simulation."""
    for stages in (2, 3, 4, 6):
        shown = schedule(capsys, "1f1b", stages=stages, microbatches=2 * stages)
        said = re.findall(r"zero_bubble .*: ([\d.]+%) bubble", shown)[0]
        other = schedule(capsys, "zero_bubble", stages=stages, microbatches=2 * stages)
        assert f"bubble       {said} of total" in other


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1F1B", "--stages", "4", "--microbatches", "8"], "Did you mean '1f1b'?"),
        (["zbw", "--stages", "4", "--microbatches", "8"], "Did you mean 'zbv'?"),
        (["dualpipev", "--stages", "4", "--microbatches", "6"], "Set microbatches=8."),
        (
            ["zbv", "--stages", "4", "--microbatches", "8", "--stages-per-rank", "3"],
            "Set stages_per_rank=2, or schedule=zero_bubble for 3.",
        ),
        (["1f1b", "--stages", "0", "--microbatches", "4"], "--stages"),
        (["1f1b", "--stages", "2", "--microbatches", "4", "--forward", "0"], "--forward"),
    ],
)
def test_what_cannot_be_drawn_is_refused(capsys, arguments, said):
    code, text = refusal(capsys, *arguments)
    assert code == 2
    assert said in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("name", schedules())
def test_the_name_is_enough(capsys, name):
    assert cli.run_command(["schedule", name]) == 0
    assert capsys.readouterr().out == schedule(capsys, name, stages=4, microbatches=8)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_every_schedule_has_two_microbatches_for_each_rank(capsys, stages):
    for name in schedules():
        assert cli.run_command(["schedule", name, "--stages", str(stages)]) == 0
        assert f", {2 * stages} microbatches" in capsys.readouterr().out


def test_without_a_name_the_schedules_are_listed(capsys):
    assert cli.run_command(["schedule"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-2]] == list(schedules())
    assert "1f1b              one forward, one backward by turns" in lines
    assert cli.run_command(["schedule", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [kind["schedule"] for kind in found] == list(schedules())


def test_1f1b_is_drawn_without_a_training_library():
    line = ["schedule", "1f1b"]
    code = (
        "import sys\nfrom boltmesh.cli import run_command\n"
        f"code = run_command({line})\n"
        "print([each for each in ('torch', 'lightning', 'textual') if each in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr


def test_a_step_that_would_take_minutes_is_refused_with_a_smaller_one(capsys):
    code, error = refusal(capsys, "gpipe", "--stages", "1000", "--microbatches", "1000")
    assert code == 2
    assert "make a step of 2,000,000 actions, and at most 262,144 are simulated" in error
    assert "--stages 256 --microbatches 512." in error
