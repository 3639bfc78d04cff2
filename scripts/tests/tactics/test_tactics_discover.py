import json

import pytest
from bench.errors import BenchError
from bench.tactics import discover, report, state
from bench.tactics.analysis import analyse
from tactics_kit import ScriptedClock, TinyOp, header, plan, run, times


def steps(folder):
    """Finished steps, without the notes of beginning and ending."""
    rows = [json.loads(line) for line in (folder / state.FILE).read_text().splitlines()]
    return [row for row in rows if row["kind"] not in ("begun", "ended")]


def test_a_hidden_tile_that_beats_the_listed_ones_is_found(tmp_path):
    clock = ScriptedClock(times(t4=1.3, t8=0.9, t16=1.0, t32=1.1))
    found, said = run(tmp_path, TinyOp(), clock)
    assert found.winner == found.challenger == (8, 0)
    assert found.baseline == (16, 0)
    assert found.verdict.outcome == "faster"
    assert found.verdict.change == pytest.approx(-0.1, abs=0.005)
    assert [item.tactic for item in found.ranked][:2] == [(8, 0), (8, 1)]
    assert all(i.interval.low <= i.ratio <= i.interval.high for i in found.ranked)
    text = report.render(found)
    assert "RECOMMENDED: (8,0)" in text and "tile    4" in "\n".join(said)


def test_every_round_times_everything_once_and_the_default_twice(tmp_path):
    clock = ScriptedClock(times(t8=0.9, t32=1.1))
    run(tmp_path, TinyOp(), clock)
    rows = [r for r in steps(tmp_path) if r["kind"] == "round"]
    ranking = [r["times"] for r in rows if r["stage"] == "rank"]
    assert len(ranking) == 9
    orders = []
    for entries in ranking:
        order = [json.dumps(tactic) for tactic, _ in entries]
        assert sorted(order) == sorted(["-1", *map(json.dumps, clock.ms)])
        orders.append(order)
    assert len(set(map(tuple, orders))) > 1  # interleaved, not in one fixed order
    confirm = [
        [tuple(t) for t, _ in r["times"]] for r in rows if r["stage"] == "confirm"
    ]
    assert len(confirm) == 9
    assert {tuple(order) for order in confirm} == {
        ((16, 0), (8, 0), (8, 0), (16, 0)),
        ((8, 0), (16, 0), (16, 0), (8, 0)),
    }


@pytest.mark.parametrize(
    ("fault", "tolerance"),
    [
        ("one row", 1e-2),
        ("writes nothing", 1e-2),
        ("raises", 1e-2),
        ("nan", 1e-2),
        ("flaky", 1e-2),
        ("one row", float("nan")),
        ("one row", -1.0),
    ],
)
def test_a_fast_wrong_tactic_is_listed_never_timed_never_recommended(
    tmp_path, fault, tolerance
):
    clock = ScriptedClock(times(t8=0.5))
    op = TinyOp({(8, 0): fault, (8, 1): fault})
    found, _ = run(tmp_path, op, clock, tolerance=tolerance)
    assert (8, 0) not in clock.asked and (8, 1) not in clock.asked
    assert found.winner is None
    assert {tactic for tactic, _ in found.failed} == {(8, 0), (8, 1)}
    assert "(8,0): " in report.render(found)


def test_a_tie_is_no_difference(tmp_path):
    found, _ = run(tmp_path, TinyOp(), ScriptedClock(times(t4=1.2), jitter=0.01))
    assert found.challenger == (8, 0) and found.winner is None
    assert found.verdict.outcome == "no difference shown"
    assert "nothing recommended" in report.render(found)


def test_the_first_timing_of_a_round_is_not_kept(tmp_path):
    class Rested(ScriptedClock):
        """Twice as fast right after the pause between two rounds."""

        def time_ms(self, tactic):
            done = len(steps(tmp_path))
            value = super().time_ms(tactic) * (0.5 if done != self.seen else 1)
            self.seen = done
            return value

    clock = Rested(times(t8=0.9))
    clock.seen = 0
    found, _ = run(tmp_path, TinyOp(), clock)
    assert found.winner == (8, 0)
    assert found.verdict.noise < 0.01
    assert found.verdict.change == pytest.approx(-0.1, abs=0.005)


def test_a_slower_hidden_tile_is_not_recommended(tmp_path):
    found, _ = run(tmp_path, TinyOp(), ScriptedClock(times(t4=1.5, t8=1.2)))
    assert found.verdict.outcome == "slower" and found.winner is None


def test_what_beats_the_default_but_not_the_best_listed_one_is_not_recommended(
    tmp_path,
):
    table = {**times(t4=1.5, t8=0.9, t16=0.8), -1: 1.2}
    found, _ = run(tmp_path, TinyOp(), ScriptedClock(table))
    assert found.baseline == (16, 0) and found.winner is None


def test_the_default_is_the_baseline_where_it_is_fastest(tmp_path):
    table = {**times(t8=0.9), -1: 0.7}
    found, _ = run(tmp_path, TinyOp(), ScriptedClock(table))
    assert found.baseline == -1 and found.winner is None


def test_luck_in_the_ranking_is_not_a_recommendation(tmp_path):
    class Lucky(ScriptedClock):
        """(8, 0) is fast while ranked and equal once it is confirmed."""

        def time_ms(self, tactic):
            value = super().time_ms(tactic)
            ranking = len(self.asked) <= 9 * 11
            return value * 0.8 if tactic == (8, 0) and ranking else value

    found, _ = run(tmp_path, TinyOp(), Lucky(times(t4=1.2)))
    assert found.ranked[0].tactic == (8, 0) and found.ranked[0].interval.high < 0.9
    assert found.winner is None


def test_a_tactic_that_cannot_be_timed_is_listed_and_left_out(tmp_path):
    table = {**times(t4=1.2, t8=0.8), (8, 0): RuntimeError("not capturable")}
    table[(4, 1)] = float("nan")
    found, _ = run(tmp_path, TinyOp(), ScriptedClock(table))
    assert found.winner == (8, 1)
    assert "not capturable" in dict(found.failed)[(8, 0)]
    assert "nan" in dict(found.failed)[(4, 1)]


def test_a_default_that_cannot_be_timed_or_is_not_finite_ends_it(tmp_path):
    table = {**times(), -1: RuntimeError("lost")}
    for _ in range(2):  # the same command again must not go on without it
        with pytest.raises(BenchError, match="default tactic cannot be timed.*lost"):
            run(tmp_path / "a", TinyOp(), ScriptedClock(table))
    with pytest.raises(BenchError, match="not finite"):
        run(tmp_path / "b", TinyOp({-1: "nan"}), ScriptedClock(times()))
    with pytest.raises(BenchError, match="default tactic does not run here.*no kernel"):
        run(tmp_path / "c", TinyOp({-1: "raises"}), ScriptedClock(times()))


def test_prediction_says_how_well_padding_foretold_the_times(tmp_path):
    as_padded = ScriptedClock(times(t4=0.7, t8=0.8, t16=0.9, t32=1.0))
    found, _ = run(tmp_path / "a", TinyOp(), as_padded)
    assert found.prediction.by_tile == pytest.approx(1)
    assert found.prediction.predicted == found.prediction.measured == 4
    reverse = ScriptedClock(times(t4=1.0, t8=0.9, t16=0.8, t32=0.7))
    found, _ = run(tmp_path / "b", TinyOp(), reverse)
    assert found.prediction.by_tile == pytest.approx(-1)
    assert found.prediction.measured == 32


def test_fewer_than_nine_repetitions_are_refused(tmp_path):
    with pytest.raises(BenchError, match="at least 9"):
        run(tmp_path, TinyOp(), ScriptedClock(times()), repetitions=8)


class Interrupted(ScriptedClock):
    """Stops the process at its n-th question, as Ctrl-C does."""

    def __init__(self, ms, at):
        super().__init__(ms)
        self.at = at

    def time_ms(self, tactic):
        if len(self.asked) == self.at:
            raise KeyboardInterrupt
        return super().time_ms(tactic)


@pytest.mark.parametrize("at", [0, 5, 11, 37, 99, 102, 110])
def test_an_interrupted_discovery_goes_on_and_repeats_no_finished_step(tmp_path, at):
    table = times(t4=1.3, t8=0.9)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, TinyOp(), Interrupted(table, at))
    before = steps(tmp_path)
    op = TinyOp()
    found, _ = run(tmp_path, op, ScriptedClock(table))
    after = steps(tmp_path)
    assert after[: len(before)] == before
    assert op.runner.runs == []  # every numerics check was done and is not repeated
    for stage in ("rank", "confirm"):
        numbers = [r["round"] for r in after if r.get("stage") == stage]
        assert numbers == list(range(9))
    assert found.winner == (8, 0)


def test_interrupted_while_checking(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, TinyOp({(8, 0): "stop"}), ScriptedClock(times()))
    done = [r["tactic"] for r in steps(tmp_path) if r["kind"] == "numerics"]
    assert done == [[16, 0], [16, 1], [32, 0], [32, 1]]
    op = TinyOp()
    found, _ = run(tmp_path, op, ScriptedClock(times(t8=0.9)))
    assert found.winner == (8, 0) and (16, 0) not in op.runner.runs


@pytest.mark.parametrize("step", ["numerics", "rank"])
def test_a_tactic_that_ends_the_process_twice_is_left_out(tmp_path, step):
    run(tmp_path, TinyOp(), ScriptedClock(times(t8=0.9)))
    path = tmp_path / state.FILE
    lines = path.read_text().splitlines()
    crash = json.dumps({"kind": "begun", "tactic": [8, 0], "step": step})
    kinds = [(json.loads(line)["kind"], json.loads(line)) for line in lines]
    end = next(
        i
        for i, (kind, row) in enumerate(kinds)
        if kind == "begun" and (row["tactic"], row["step"]) == ([8, 0], step)
    )
    # What a process leaves that died there, twice.
    path.write_text("\n".join([*lines[:end], crash]) + "\n")
    found, _ = run(tmp_path, TinyOp(), ScriptedClock(times(t8=0.9)))
    assert found.winner == (8, 0)  # once may have been anything: tried again
    path.write_text("\n".join([*lines[:end], crash, crash]) + "\n")
    op, clock = TinyOp(), ScriptedClock(times(t8=0.9))
    found, _ = run(tmp_path, op, clock)
    assert (8, 0) not in (op.runner.runs if step == "numerics" else clock.asked)
    assert "ended the process 2 times" in dict(found.failed)[(8, 0)]
    assert found.winner == (8, 1)


def test_a_default_that_ends_the_process_twice_ends_every_run(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, TinyOp(), Interrupted(times(), 0))
    path = tmp_path / state.FILE
    kept = [line for line in path.read_text().splitlines() if '"begun"' not in line]
    kept = [line for line in kept if '"ended"' not in line]
    crash = json.dumps({"kind": "begun", "tactic": -1, "step": "rank"})
    path.write_text("\n".join([*kept, crash, crash]) + "\n")
    for _ in range(2):
        with pytest.raises(BenchError, match="default tactic cannot.*ended the proc"):
            run(tmp_path, TinyOp(), ScriptedClock(times(t8=0.9)))


class LostLater(ScriptedClock):
    """Some tactics work while ranked and for `left` more calls each."""

    def __init__(self, ms, lost, left):
        super().__init__(ms)
        self.left = dict.fromkeys(lost, left)

    def time_ms(self, tactic):
        if tactic in self.left and len(self.asked) >= 9 * 11:
            self.left[tactic] -= 1
            if self.left[tactic] < 0:
                raise RuntimeError("lost later")
        return super().time_ms(tactic)


@pytest.mark.parametrize("left", [0, 3])
def test_the_next_best_is_confirmed_when_the_best_hidden_one_is_lost(tmp_path, left):
    table = times(t4=0.9, t8=0.8)
    found, _ = run(tmp_path, TinyOp(), LostLater(table, [(8, 0), (8, 1)], left))
    assert found.challenger == found.winner == (4, 0)
    assert found.verdict.change == pytest.approx(-0.1, abs=0.005)
    assert {"lost later" in why for _, why in found.failed} == {True}
    # Nothing is left to do: the same command only reads.
    again, _ = run(tmp_path, TinyOp(), ScriptedClock({}))
    assert again.winner == (4, 0)


def test_nothing_is_recommended_when_every_hidden_one_is_lost(tmp_path):
    hidden = [(tile, config) for tile in (4, 8) for config in (0, 1)]
    found, _ = run(tmp_path, TinyOp(), LostLater(times(t8=0.8), hidden, 1))
    assert found.challenger is None and found.winner is None


@pytest.mark.parametrize("left", [0, 3, 22])
def test_a_baseline_that_is_lost_in_confirmation_is_not_beaten(tmp_path, left):
    table = {**times(t8=0.8), (16, 0): 0.95}
    found, _ = run(tmp_path, TinyOp(), LostLater(table, [(16, 0)], left))
    assert found.baseline == (16, 0) and found.winner is None
    assert "baseline could not be timed" in report.render(found)


def test_a_cut_last_line_is_dropped_and_a_damaged_one_refused(tmp_path):
    run(tmp_path, TinyOp(), ScriptedClock(times(t8=0.9)))
    path = tmp_path / state.FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    found, _ = run(tmp_path, TinyOp(), ScriptedClock(times(t8=0.9)))
    assert found.winner == (8, 0)
    lines = whole.split(b"\n")
    for bad in (b"{", b"[1]", b"{}"):
        path.write_bytes(b"\n".join([lines[0], bad, *lines[2:]]))
        with pytest.raises(BenchError, match="discover.jsonl:2 is damaged"):
            run(tmp_path, TinyOp(), ScriptedClock(times()))


def test_another_question_in_the_same_folder_is_refused(tmp_path):
    run(tmp_path, TinyOp(), ScriptedClock(times(t8=0.9)))
    before = (tmp_path / state.FILE).read_bytes()
    with pytest.raises(BenchError, match=r"(?s)repetitions: there 9, now 10.*--state"):
        run(tmp_path, TinyOp(), ScriptedClock(times()), repetitions=10)
    assert (tmp_path / state.FILE).read_bytes() == before


def test_two_discoveries_do_not_share_a_folder(tmp_path):
    with state.opened(tmp_path, header()):
        with pytest.raises(BenchError, match="in use"):
            with state.opened(tmp_path, header()):
                pass
    with state.opened(tmp_path, header()):
        pass


def test_unwritable_and_missing_folders(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot write"):
        run(tmp_path / "file", TinyOp(), ScriptedClock(times()))
    with pytest.raises(BenchError, match="--state"):
        state.read(tmp_path / "none")


def test_an_unfinished_discovery_recommends_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, TinyOp(), Interrupted(times(t8=0.5), 9 * 11 + 5 * 7))
    assert analyse(state.read(tmp_path)).winner is None
    with state.opened(tmp_path / "empty", header(10)):
        pass
    with state.opened(tmp_path / "empty", header()) as held:
        assert held.rows == state.read(held.folder).rows  # nothing was lost
        assert held.header["repetitions"] == 9
    with pytest.raises(BenchError, match="no timed round"):
        analyse(state.read(tmp_path / "empty"))


def test_an_op_that_cannot_run_here_is_refused_before_timing(tmp_path):
    class Elsewhere(TinyOp):
        def case(self, tokens, routing, *, for_listing=False):
            case = super().case(tokens, routing)
            case.can_run = False
            return case

    clock = ScriptedClock(times())
    with state.opened(tmp_path, header()) as held:
        with pytest.raises(BenchError, match="cannot run on this machine"):
            discover.run(
                held, Elsewhere(), plan(), lambda case: clock, lambda line: None
            )
    assert clock.asked == []
