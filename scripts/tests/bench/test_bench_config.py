"""Experiment files: every mistake is named with its key and its file."""

import benchkit
import pytest
from bench import config
from bench.errors import BenchError
from benchkit import SCRIPTS, run_bench

EXAMPLES = sorted((SCRIPTS / "bench" / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_valid_experiments(path):
    read = config.load(path)
    runs = config.schedule(read)
    assert {run.arm for run in runs} <= set(read.arms)
    assert any(run.arm == read.baseline for run in runs)
    assert read.load or read.outputs


def test_the_seeds_six_runs_keep_their_order_and_pairs():
    path = SCRIPTS / "bench" / "examples" / "b300-tp1-pp8.toml"
    runs = config.schedule(config.load(path))
    assert [run.label for run in runs] == ["A1", "KDA", "MoE", "B1", "A2", "B2"]
    assert [run.pair for run in runs] == [1, 1, 1, 1, 2, 2]
    load = config.load(path).load
    assert (load.isl, load.osl, load.concurrency) == (65536, 1, 4)
    assert (load.requests, load.warmup, load.cached_share) == (128, 8, 0)


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"lod": 1}, "unknown key lod; did you mean load?"),
        ({"load__islen": 1}, "unknown key load.islen; did you mean isl?"),
        (
            {"arms__base__patch": True},
            "unknown key arms.base.patch; did you mean patches?",
        ),
        ({"server__nodes": [{"comand": "x"}]}, "unknown key server.nodes[0].comand"),
        (
            {"schedule__runs": [{"lable": "A1", "arm": "base"}]},
            "schedule.runs[0].lable",
        ),
        ({"outputs__length": [1]}, "unknown key outputs.length; did you mean lengths?"),
    ],
)
def test_an_unknown_key_is_named_with_its_file(tmp_path, changes, key):
    path = benchkit.write(tmp_path, "engine", **changes)
    with pytest.raises(BenchError) as caught:
        config.load(path)
    assert str(caught.value).startswith(f"{path}: ") and key in str(caught.value)


def test_the_command_line_shows_such_an_error_without_a_traceback(tmp_path):
    path = benchkit.write(tmp_path, "engine", load__islen=1)
    done = run_bench("serve-ab", path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"bench serve-ab: {path}: unknown key load.islen")
    assert "known keys here: isl, osl, concurrency" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"load__isl": "64K"}, "key load.isl: Expected `int`, got `str`"),
        ({"baseline": "none"}, "baseline is 'none', arms are base, series"),
        ({"arms__base__url": "http://x"}, "arms.base: give either engine or url"),
        ({"arms__base__revision": "x"}, "arms.base: give either patches or revision"),
        ({"arms__base__same_tree_as": "x"}, "arms.base.same_tree_as: no arm 'x'"),
        ({"server__model": ""}, "no model; set server.model"),
        ({"load__cached_share": 1.0}, "key load.cached_share: Expected `float` < 1.0"),
        ({"load__isl": 1}, "key load.isl: Expected `int` >= 2"),
        ({"load__osl": 0}, "key load.osl: Expected `int` >= 1"),
        ({"load__requests": 0}, "key load.requests: Expected `int` >= 1"),
        ({"load__concurrency": 0}, "key load.concurrency: Expected `int` >= 1"),
        ({"load__warmup": -1}, "key load.warmup: Expected `int` >= 0"),
        ({"load__seed": -1}, "key load.seed: Expected `int` >= 0"),
        ({"load__cached_slack": -1}, "key load.cached_slack: Expected `int` >= 0"),
        ({"schedule__pairs": -1}, "key schedule.pairs: Expected `int` >= 0"),
        ({"server__port": 65536}, "key server.port: Expected `int` <= 65535"),
        (
            {"server__ready_timeout": 0},
            "key server.ready_timeout: Expected `float` > 0",
        ),
        ({"server__stop_grace": -1}, "key server.stop_grace: Expected `float` >= 0"),
        (
            {"outputs__lengths": [], "outputs__concurrent": 0},
            "outputs: no request; give lengths",
        ),
        ({"outputs__lengths": [8, 0]}, "key outputs.lengths[1]: Expected `int` >= 1"),
        ({"outputs__repeats": 0}, "key outputs.repeats: Expected `int` >= 1"),
        ({"outputs__new_tokens": 0}, "key outputs.new_tokens: Expected `int` >= 1"),
        ({"outputs__concurrent": -1}, "key outputs.concurrent: Expected `int` >= 0"),
        ({"outputs__concurrency": 0}, "key outputs.concurrency: Expected `int` >= 1"),
        (
            {"continuation": {"contexts": [], "control": 0}},
            "continuation: no request; give contexts",
        ),
        ({"continuation__contexts": [0]}, "key continuation.contexts[0]: Expected"),
        ({"continuation__length": 0}, "key continuation.length: Expected `int` >= 1"),
        ({"continuation__control": -1}, "key continuation.control: Expected `int` >="),
        ({"continuation__fill": -1}, "key continuation.fill: Expected `int` >= 0"),
        ({"continuation__max_mean": -1.0}, "key continuation.max_mean: Expected"),
        ({"branching__seeds": []}, "key branching.seeds: Expected `array` of length"),
        ({"branching__prefix": 0}, "key branching.prefix: Expected `int` >= 1"),
        ({"branching__span": 0}, "key branching.span: Expected `int` >= 1"),
        ({"branching__span": 13}, "branching.span is 13, but a branch has only 12"),
        ({"branching__collapse": 0}, "key branching.collapse: Expected `float` > 0"),
        ({"token_range": [5, 5]}, "token_range: the first id must be below"),
        ({"token_range": [-5, 5]}, "key token_range[0]: Expected `int` >= 0"),
        ({"server__nodes": [{"command": "x"}]}, "server.port is 0"),
        ({"schedule__runs": [{"label": "A1", "arm": "x"}]}, "schedule.runs A1: no arm"),
        (
            {"schedule": {"runs": [{"label": "A", "arm": "base"}] * 2}},
            "label A is used twice",
        ),
        (
            {"schedule__runs": [{"label": "A1", "arm": "base"}]},
            "schedule: give either pairs or runs",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_file(tmp_path, changes, text):
    path = benchkit.write(tmp_path, "engine", **changes)
    with pytest.raises(BenchError) as caught:
        config.load(path)
    assert str(caught.value).startswith(f"{path}: ") and text in str(caught.value)


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("baseline = 'a'\n[arms.a]\nengine = 'e'\n")
    with pytest.raises(BenchError, match="key experiment is missing"):
        config.load(path)


@pytest.mark.parametrize("content", [b"a = ", b"\xff\xfe", b"[a]\n[a]\n"])
def test_a_file_that_is_not_toml_is_named(tmp_path, content):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(BenchError, match="is not TOML"):
        config.load(path)


def test_a_missing_file_points_at_the_examples(tmp_path):
    with pytest.raises(BenchError, match="examples"):
        config.load(tmp_path / "none.toml")


def test_pairs_alternate_their_order():
    arms = {name: config.Arm(engine="e") for name in ("series", "base")}
    read = config.Config(experiment="x", baseline="base", arms=arms)
    read.schedule.pairs = 3
    labels = [run.label for run in config.schedule(read)]
    assert labels == [
        *("base-1", "series-1"),
        *("series-2", "base-2"),
        *("base-3", "series-3"),
    ]


def test_the_digest_is_about_results_not_places(tmp_path):
    def digest(**changes):
        return config.digest(config.load(benchkit.write(tmp_path, "e", **changes)))

    same = digest()
    assert digest(server__port=31000) == same
    assert digest(arms__base__engine="elsewhere") == same
    for change in (
        {"load__isl": 41},
        {"load__seed": 9},
        {"server__arguments": ["--x"]},
        {"arms__series__environment": {"A": "1"}},
        {"arms__series__patches": False},
        {"server__model": "other"},
        {"outputs__new_tokens": 6},
        {"token_range": [2, 500]},
    ):
        assert digest(**change) != same, change
