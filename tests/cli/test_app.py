"""The command line, as a shell sees it."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from merakc.cli.app import app
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile, load_plan
from merakc.machines.garbage import NEW_OBJECTS
from merakc.version import __version__

DEEP = "tests.small_source:deep"
ASKED = ["--ranks", "2", "--batch", "8", "--cluster", "cpu"]
SMALL = ["plan", "tests.small_source:small", *ASKED]
OTHER = ["plan", *ASKED]


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


def test_the_version_is_said() -> None:
    assert run("--version") == f"merakc {__version__}\n"


def test_for_a_command_that_is_none_the_nearest_is_named() -> None:
    assert "No such command 'chekpoint'. Did you mean 'checkpoint'?" in run("chekpoint", code=2)
    assert "No such command 'xyz'." in run("xyz", code=2)
    assert "Did you mean" not in run("xyz", code=2)


def test_help_is_broken_by_the_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = run("--help")
    assert "compare loss, every gradient and the updated weights with one process." in said
    assert "the dims that are split over tp. JSON is networkx's" in run("graph", "--help")
    assert "[default: (the cluster's)]" in run("plan", "--help")
    assert "--install-completion" not in run("checkpoint", "--help")


def test_one_is_no_plural(tmp_path: Path) -> None:
    asked = ["tests.small_source:small", "--ranks", "1", "--batch", "1", "--cluster", "cpu"]
    file = str(tmp_path / "plan.json")
    said = [
        run("plan", *asked, "-o", file), run("show", file), run("simulate", file, asked[0]),
        run("diff", file, file), run("plan", *asked, "--dp", "2", code=2),
        run("plan", *asked, "--micro-batches", "2", code=2),
    ]  # fmt: skip
    for text in said:
        assert not re.search(r"\b1 (micro-batche|stage|rank|sample|device|layout|part)s\b", text)


def test_a_budget_that_cannot_be_kept_is_an_answer_and_no_wrong_use() -> None:
    said = run(*SMALL, "--recompute", "1KiB", code=1)
    assert said.startswith("FitError: a rank needs ")
    assert "ConfigError: recompute '1.5' is not" in run(*SMALL, "--recompute", "1.5", code=2)


@pytest.mark.parametrize(
    ("arguments", "option", "remedy"),
    [
        ("show no.json --seq 4", "--seq", "give --passes SOURCE too"),
        ("show no.json --cluster cpu", "--cluster", "give --passes SOURCE too"),
        ("show no.json --trust-remote-code", "--trust-remote-code", "give --passes SOURCE too"),
        ("show no.json --json --tokens 1B", "--tokens", "give no other form"),
        ("show no.json --html a.html --tokens 1B", "--tokens", "give no other form"),
        ("show no.json --price 2", "--price", "give its --tokens too"),
        ("plan gpt2 --batch 8 --price 2", "--price", "give its --tokens too"),
        ("plan gpt2 --batch 8 --json --tokens 1B", "--tokens", "give no other form"),
        ("plan tests.small_source:small --batch 8 --seq 4", "--seq 4", "let the function give"),
        ("scale gpt2 --batch 8 --price 2", "--price", "give its --tokens too"),
        ("budget gpt2 --batch 8 --price 2", "--price", "give its --tokens too"),
        ("simulate no.json gpt2 --price 2", "--price", "give its --tokens too"),
        ("doctor -o a.html", "--output", "give --gpu too"),
        ("doctor --only products", "--only", "give --gpu too"),
        ("doctor --device cpu", "--device", "give --gpu too"),
        ("diff a.json b.json --skip 0", "--skip", "give its .jsonl ledger"),
        ("diff a.json b.jsonl --all", "--all", "give another in place of the ledger"),
        ("calibrate --skip 1", "--skip", "give their ledgers with --from"),
        ("calibrate --from a.jsonl --ranks 2", "--ranks", "give no --from"),
        ("calibrate --from a.jsonl --device cpu", "--device", "give no --from"),
    ],
)
def test_an_option_of_which_nothing_would_come_is_refused(
    arguments: str, option: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run(*arguments.split(), code=2)
    assert said.startswith(f"ConfigError: {option}")
    assert remedy in said
    assert "leave --" in said


def test_a_command_imports_what_it_needs() -> None:
    """Nobody waits for the compiler to see two plans beside each other."""
    code = (
        "import sys; from merakc.cli.app import app; import merakc.cli.diff, merakc.cli.show; "
        "print([m for m in ('merakc.api', 'merakc.planner', 'sympy', 'scipy', 'matplotlib') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_python_rarely_looks_for_garbage_while_a_command_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, found = gc.get_threshold(), list[int]()
    monkeypatch.setattr("merakc.cli.diff.diff", lambda: found.append(gc.get_threshold()[0]))
    run("diff")
    assert found == [NEW_OBJECTS]
    assert gc.get_threshold() == before


@pytest.mark.parametrize("after_s", [0.2, 0.6])
def test_ctrl_c_while_packages_are_imported_is_no_traceback(after_s: float) -> None:
    code = "from merakc.cli.app import app; print('begun', flush=True); app()"
    command = [sys.executable, "-c", code, *SMALL]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode
    assert "Traceback" not in told


def test_plan_show_and_diff(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    printed = run(*SMALL, "--tp", "2", "-o", str(first))
    assert "dp 1 x tp 2 x pp 1 = 2 ranks" in printed
    assert f"written to {first}" in printed.replace("\n", "")
    assert load_plan(first).decisions.tp == 2
    assert "dp 1 x tp 2 x pp 1" in run("show", str(first))
    assert json.loads(run("show", str(first), "--json"))["decisions"]["tp"] == 2
    options = ("--dp", "2", "--state-shards", "1,2,2", "--precision", "bf16-mixed")
    run(*SMALL, *options, "-o", str(second))
    assert str(load_plan(second).decisions.shards(0)) == "1, 2, 2"
    assert "decide the same" in run("diff", str(first), str(first))
    assert "precision" in run("diff", str(first), str(second), code=1)
    changes = json.loads(run("diff", str(first), str(second), "--json", code=1))["changes"]
    assert {"what": "tp", "first": "2", "second": "1"} in changes


def test_plan_with_communication_under_computation(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    options = (*SMALL, "--tp", "2", "--micro-batches", "1", "-o", str(file))
    assert "micro-batches in 2 parts" in run(*options, "--overlap", "2")
    assert load_plan(file).decisions.sub_batches == (2,)
    run(*options, "--overlap", "0")
    assert load_plan(file).decisions.sub_batches == ()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "no.json"), "PlanError: no.json: cannot be read (No such file or directory)"),
        ((*SMALL, "--cluster", "moon"), "ClusterError: moon: cannot be read as a cluster file"),
        ((*SMALL, "--state-shards", "1,x,2"), "give zero-1 to zero-3, or three numbers"),
        ((*SMALL, "--precision", "fp8"), "precision 'fp8' is not known"),
        ((*SMALL, "--schedule", "best"), "schedule 'best' is not known"),
        ((*SMALL, "--tp", "2", "--overlap", "99"), "overlap=99: no stage can run a micro-batch so"),
        ((*SMALL, "--dp", "2", "--batch", "3"), "3 samples does not divide over dp=2"),
        (
            (*SMALL, "--tp", "1", "--pp", "1", "--batch", "3"),
            "over dp=2 of 2 ranks; give a multiple",
        ),
        ((*SMALL, "--dp", "3"), "dp=3 does not multiply to 2 ranks"),
        ((*SMALL, "--dp", "1", "--tp", "1", "--pp", "1"), "does not multiply to 2 ranks"),
        ((*SMALL, "--tp", "0"), "greater than or equal to 1"),
        ((*SMALL, "--micro-batches", "3"), "over any dp of 2 ranks and into 3 micro-batches"),
        (
            (*SMALL, "--recompute", "some"),
            "recompute 'some' is not known; choose one of auto, none",
        ),
        ((*SMALL, "--cluster", "h100:many"), "'many' is no number of nodes; give h100:NODES"),
        ((*SMALL, "-o", "no/plan.json"), "--output no/plan.json: there is no folder no"),
        ((*OTHER, "tests.small_source:lossless"), "the forward of Linear returns no loss"),
        (
            (*OTHER, "tests.small_source:misfit"),
            "the model's forward fails on the batch: RuntimeError: a and b must have same",
        ),
    ],
)
def test_what_cannot_be_used_is_one_message(arguments: tuple[str, ...], text: str) -> None:
    printed = run(*arguments, code=2)
    assert text in " ".join(printed.split())
    assert "Traceback" not in printed


def test_a_plan_that_does_not_fit_says_so(tmp_path: Path) -> None:
    file = str(tmp_path / "big.json")
    printed = run("plan", "llama-3-8b", "--ranks", "1", "--batch", "1", "--seq", "128", "-o", file,
                  code=1)  # fmt: skip
    assert "FitError: nothing fits the 71.09 GiB that a device has for tensors" in printed
    assert not Path(file).exists()


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node of H100 and one of A100, and two of A100."""
    folder = tmp_path_factory.mktemp("unlike")
    links = (
        '[[links]]\nname = "inside"\ndevices = 2\nbytes_per_s = 3e11\n'
        '[[links]]\nname = "outside"\ndevices = 4\nbytes_per_s = 1e10\n'
    )
    for name, devices in (("mixed", ("h100", "a100-40")), ("even", ("a100-40", "a100-40"))):
        nodes = "".join(f'[[nodes]]\ndevice = "{device}"\ndevices = 2\n' for device in devices)
        (folder / f"{name}.toml").write_text(f'name = "{name}"\n{nodes}{links}')
    return folder


def blocks(plan: Plan) -> list[int]:
    """The blocks of each stage."""
    held = {(name.split(".")[1], s) for name, own in plan.parameters.items() for s in own}
    return [sum(stage == s for _, stage in held) for s in range(len(plan.rank_of))]


def test_unlike_nodes_get_uneven_stages(unlike: Path) -> None:
    source, mixed, even = DEEP, str(unlike / "mixed.toml"), str(unlike / "even.toml")
    first, second = unlike / "uneven.json", unlike / "even.json"
    asked = ("--batch", "16", "--precision", "bf16-mixed", "--schedule", "1f1b")
    printed = run("plan", source, *asked, "--cluster", mixed, "-o", str(first))
    found = load_plan(first)
    assert found.report is not None
    assert found.prediction is not None
    assert "device" in printed
    own: dict[str, list[int]] = {"h100": [], "a100-40": []}
    for count, stage in zip(blocks(found.decisions), found.report.stages, strict=True):
        own[stage.device].append(count)
    assert min(own["h100"]) > 1.5 * max(own["a100-40"])
    seconds = [s.forward_s + s.backward_s for s in found.report.stages]
    assert max(seconds) < 1.3 * min(seconds)

    degrees = [f"--{name}={getattr(found.decisions, name)}" for name in ("dp", "tp", "pp")]
    fixed = (*asked, *degrees, f"--micro-batches={found.decisions.micro_batches}")
    printed = run("plan", source, *fixed, "--cluster", even, "-o", str(second))
    assert "device" not in printed.split("Stages")[1].splitlines()[1]
    plan = replace(load_plan(second).decisions, inner=found.decisions.inner)
    assert blocks(plan) == [24 // plan.pp] * plan.pp
    PlanFile(plan).save(second)
    sides = json.loads(
        CliRunner().invoke(app, ["simulate", str(second), source, "--from", mixed, "--json"]).stdout
    )
    # The even stages on unlike nodes, and the same decisions with stages cut for these.
    assert found.prediction.step_s < 0.8 * sides["before"]["step_s"]
    assert sides["after"]["step_s"] == pytest.approx(found.prediction.step_s, rel=0.05)


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"]])
def test_output_that_nobody_reads_to_its_end_is_no_error(arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-c", "from merakc.cli.app import app; app()", *arguments]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")
