"""The registered end-to-end tests: collected, skipped, and their bodies run on CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "test" / "registered" / "e2e" / "models"
BODIES = Path(__file__).with_name("e2e_bodies_on_cpu.py")
KIMI = "test_kimi_k3_prefill_arms_b300"
GLM = "test_glm53_flash_kda_flashinfer_prefill_b200"
KIT = "sglang/test/kits/prefill_arms_kit.py"


def engine_env(cache: Path) -> dict[str, str]:
    """The patched engine first on the path: the built one, else an inherited one."""
    python = ROOT / "build" / "engine" / "python"
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if not (python / KIT).is_file() and not any(
        (Path(folder) / KIT).is_file() for folder in inherited if folder
    ):
        pytest.fail("no patched engine: run `python3 scripts/series.py apply` first")
    paths = [str(python), *filter(None, inherited)]
    # The server is started as `sglang serve`, from the folder of this interpreter.
    binaries = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join(binaries),
        "HF_HUB_OFFLINE": "1",
        # The KL kit looks for its prompts here before it asks a hub.
        "XDG_CACHE_HOME": str(cache),
    }


def run_group(command, *, seconds, log):
    """Run a command in its own process group and leave nothing of it behind."""
    with log.open("w") as out:
        child = subprocess.Popen(
            command,
            env=engine_env(log.parent),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{command} took over {seconds} s:\n{log.read_text()[-3000:]}")
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("bodies")


@pytest.fixture(scope="module")
def outcomes(scratch):
    log = scratch / "run.log"
    status = run_group(
        [sys.executable, str(BODIES), str(MODELS), str(scratch)], seconds=1500, log=log
    )
    report = scratch / "outcomes.json"
    assert report.is_file(), f"exit status {status}:\n{log.read_text()[-4000:]}"
    return json.loads(report.read_text())


ARMS = (
    "test_server_log_states_the_path",
    "test_greedy_outputs_equal_the_reference",
    "test_cached_branches_match_cold_scores",
)
RUN = [
    *(f"KimiOnCpu.{name}" for name in ARMS),
    "KimiOnCpu.test_env_of_an_arm_reaches_the_server",
    "KimiOnCpu.test_gsm8k",
    "KimiOnCpu.test_input_output_logprobs_match_prefill_cache_hit",
    "KimiOnCpu.test_input_output_logprobs_match_decode_cache_hit",
    *(f"GlmOnCpu.{name}" for name in ARMS),
    "CommandLines.test_flags_exist",
    "CommandLines.test_base_arm_is_not_seeded",
]
FAIL = {
    f"BrokenOnCpu.{ARMS[0]}": (
        "'no such line' is not in the server log",
        "ready to roll!' is in the server log",
    ),
    f"BrokenOnCpu.{ARMS[1]}": ("Lists differ",),
    f"BrokenOnCpu.{ARMS[2]}": ("avg_kl_div=",),
    f"WrongPrefixStateOnCpu.{ARMS[2]}": ("avg_kl_div=",),
}
SKIP = {
    "KimiOnCpu.test_prefix_cache_branching": "an attention model's cache",
    "GlmOnCpu.test_gsm8k": "the same body",
    f"setUpClass ({KIMI}.TestKimiK3PrefillArmsB300)": "needs 8 GPUs",
    f"setUpClass ({GLM}.TestGLM53FlashKdaFlashInferPrefillB200)": "needs 4 GPUs",
}


@pytest.mark.parametrize("name", RUN)
def test_body_passes_on_a_sound_server(outcomes, name):
    assert outcomes[name] == ["ok", ""]


@pytest.mark.parametrize("name", FAIL)
def test_body_fails_when_something_is_wrong(outcomes, name):
    outcome, text = outcomes[name]
    assert outcome == "failed" and all(said in text for said in FAIL[name]), text


@pytest.mark.parametrize("name", SKIP)
def test_skips_state_their_reason(outcomes, name):
    outcome, reason = outcomes[name]
    assert outcome == "skipped" and SKIP[name] in reason


def test_nothing_else_ran(outcomes):
    """A body that is added to the kits must be added to the lists above."""
    assert set(outcomes) == {*RUN, *FAIL, *SKIP}


def test_the_server_is_gone(outcomes, scratch):
    pid = int((scratch / "server.pid").read_text())
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.2)
    pytest.fail(f"the server, process {pid}, still runs")


def test_run_as_ci_runs_it(tmp_path):
    """`python3 FILE -f` ends well and says why nothing ran."""
    log = tmp_path / "run.log"
    command = [sys.executable, str(MODELS / f"{KIMI}.py"), "-f"]
    assert run_group(command, seconds=200, log=log) == 0
    assert "OK (skipped=1)" in log.read_text()
