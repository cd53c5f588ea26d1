"""The search algorithm by itself, on synthetic spaces."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kgen.model.config import Config
from kgen.search.encoding import INACTIVE, Encoding
from kgen.search.proposer import Proposer
from kgen.search.scoring import MOST_APART
from kgen.search.surrogate import Hyper, Posterior, fit, log_expected_improvement

R = range(12)


def synthetic() -> tuple[Encoding, list[float | None]]:
    """2 variants, 3600 configs, interactions, a cliff at large footprints, failures beyond it."""
    configs: list[Config] = []
    times: list[float | None] = []
    for x in range(12):
        for y in range(10):
            for vec in (1, 2, 4, 8):
                for stages in (1, 2, 3, 4, 5):
                    values = {"x": 16 * (x + 1), "y": y + 1, "vec": vec, "stages": stages}
                    configs.append(Config.of("tiled", values))
                    footprint = (x + 1) * (y + 1) * stages
                    cost = 1.0 + 0.15 * abs(x - 7) + 0.1 * abs(y - 5) + 0.3 * abs(stages - 3)
                    cost *= 1.0 + 0.4 * abs(math.log2(vec) - 2) + (2.0 if footprint > 150 else 0.0)
                    times.append(None if footprint > 300 else cost)
                if vec < 8:
                    for mode in ("a", "b", "c", "d"):
                        values_rows: dict[str, int | str] = {"x": x, "y": y, "mode": mode}
                        values_rows["vec"] = vec
                        configs.append(Config.of("rows", values_rows))
                        times.append(3.0 + 0.2 * x + 0.1 * y + (0.5 if mode != "c" else 0.0))
    return Encoding(configs), times


def search(
    encoding: Encoding, times: list[float | None], seed: int, count: int, batch: int
) -> list[int]:
    proposer = Proposer(encoding, seed)
    seen: list[int] = []
    while len(seen) < count and (picks := proposer.propose(min(batch, count - len(seen)))):
        for i in picks:
            proposer.tell(i, times[i])
        seen += picks
    return seen


def best_of(times: list[float | None], picks: list[int]) -> float:
    return min(t for i in picks if (t := times[i]) is not None)


def test_encoding_shares_columns_and_keeps_variants_apart() -> None:
    encoding, _ = synthetic()
    assert encoding.variants == ("tiled", "rows")
    assert encoding.columns == ("x", "y", "vec", "stages", "mode")
    rows = encoding.variant_of == 1
    assert (encoding.codes[rows, 3] == INACTIVE).all()
    assert (encoding.codes[~rows, 4] == INACTIVE).all()
    assert encoding.features.min() >= 0
    assert encoding.features.max() <= 1


def test_neighbours_stay_in_the_variant_and_differ_little() -> None:
    encoding, _ = synthetic()
    one, two = encoding.neighbours(100)
    here = encoding.configs[100].as_dict()
    for i in one:
        there = encoding.configs[i]
        assert there.variant == "tiled"
        assert sum(there.as_dict()[k] != here[k] for k in here) == 1
    for i in two:
        assert sum(encoding.configs[i].as_dict()[k] != here[k] for k in here) == 2
    assert len(one) == 11 + 9 + 3 + 4


def test_equal_configs_count_once() -> None:
    config = Config.of("a", {"x": 1})
    assert len(Encoding([config, config, Config.of("a", {"x": 2})])) == 2


@pytest.mark.parametrize("batch", [1, 7, 32])
def test_never_repeats_and_covers_everything(batch: int) -> None:
    configs = [Config.of("a", {"x": x, "y": y}) for x in range(9) for y in range(9) if x + y < 12]
    encoding = Encoding(configs)
    times = [None if len(c.values) > 9 else 1.0 + c.as_dict()["x"] for c in configs]  # type: ignore[operator]
    seen = search(encoding, times, seed=0, count=1000, batch=batch)
    assert sorted(seen) == list(range(len(configs)))


def test_all_failing_ends_too() -> None:
    encoding = Encoding([Config.of("a", {"x": x}) for x in range(40)])
    assert len(search(encoding, [None] * 40, seed=0, count=100, batch=8)) == 40


def test_single_config_and_constant_times() -> None:
    assert search(Encoding([Config.of("a", {})]), [1.0], 0, 10, 4) == [0]
    encoding = Encoding([Config.of("a", {"x": x}) for x in range(50)])
    assert len(search(encoding, [5.0] * 50, seed=0, count=50, batch=8)) == 50


def test_same_seed_same_proposals() -> None:
    encoding, times = synthetic()
    runs = [search(encoding, times, seed, 48, 8) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


def test_first_and_pending_are_respected() -> None:
    encoding, _ = synthetic()
    proposer = Proposer(encoding, 0, first=[9, 9, 4])
    proposer.mark_pending(4)
    assert proposer.propose(3)[0] == 9
    proposer.release(4)
    assert 4 not in proposer.propose(0)


def test_design_visits_every_variant() -> None:
    encoding, _ = synthetic()
    picks = Proposer(encoding, 1).propose(10)
    assert set(encoding.variant_of[picks].tolist()) == {0, 1}


def test_batch_is_diverse() -> None:
    """A batch of 32 after 32 times is not one value of every parameter with small changes."""
    encoding, times = synthetic()
    values = []  # distinct ones of the first two parameters
    for seed in range(4):
        proposer = Proposer(encoding, seed)
        for i in proposer.propose(32):
            proposer.tell(i, times[i])
        picks = proposer.propose(32)
        assert len(set(picks)) == 32
        codes = encoding.codes[picks]
        values += [len(np.unique(codes[:, d])) for d in range(2)]
        apart = (codes[:, None, :] != codes[None, :, :]).sum(2)
        assert apart[np.triu_indices(32, 1)].mean() > 1.5
    assert min(values) >= 3
    assert np.mean(values) >= 5


@pytest.mark.parametrize("timed", [0, 60])
def test_a_round_of_many_workers_costs_what_a_batch_costs(
    timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker of a joint tune requests a round for all workers, and takes one config of it."""
    encoding, times = synthetic()
    proposer = Proposer(encoding, 0)
    order = np.random.default_rng(0).permutation(len(times)).tolist()
    for i in order[:timed]:
        proposer.tell(i, times[i])
    for i in order[timed:560]:
        proposer.mark_pending(i)
    calls: list[int] = []
    believe, spread = Posterior.believe, Proposer._spread
    monkeypatch.setattr(Posterior, "believe", lambda self, i: believe(self, _noted(calls, i)))
    monkeypatch.setattr(
        Proposer, "_spread", lambda self, free, rng: _noted(calls, spread(self, free, rng)))
    picks = proposer.propose(1000)
    assert len(set(picks)) == 1000
    assert not set(picks) & set(order[:560])
    assert len(calls) == MOST_APART


def _noted(calls: list[int], i: int) -> int:
    calls.append(i)
    return i


def test_beats_random_by_a_margin() -> None:
    encoding, times = synthetic()
    optimum = best_of(times, list(range(len(times))))
    seeds = range(6)
    ours = np.mean([best_of(times, search(encoding, times, s, 96, 8)) for s in seeds])
    order = [np.random.default_rng(s).permutation(len(times))[:96].tolist() for s in seeds]
    luck = np.mean([best_of(times, picks) for picks in order])
    assert ours / optimum < 1.2
    assert luck - optimum > 3 * (ours - optimum)


def test_learns_where_configs_fail() -> None:
    """Half of the space fails, and the fast side is the side that fails."""
    configs = [Config.of("a", {"x": x, "y": y, "z": z}) for x in R for y in R for z in R[:6]]
    encoding = Encoding(configs)
    times: list[float | None] = []
    for config in configs:
        x, y, z = (float(value) for _, value in config.values)
        times.append(None if x + y > 11 else 40.0 - x - y + z)
    seen = search(encoding, times, 0, 96, 8)
    assert sum(t is None for t in times) > 0.45 * len(times)
    assert sum(times[i] is None for i in seen[32:]) < 0.5 * 64
    assert best_of(times, seen) == 29.0


def test_prior_of_another_gpu_helps_and_does_not_bind() -> None:
    encoding, times = synthetic()
    optimum = best_of(times, list(range(len(times))))
    noise = np.random.default_rng(0).normal(0.0, 0.15, len(times))
    close = {i: t * math.exp(noise[i]) for i, t in enumerate(times) if t is not None}
    wrong = {i: 1.0 / t for i, t in enumerate(times) if t is not None}

    def found(prior: dict[int, float], count: int) -> float:
        proposer = Proposer(encoding, 0, prior_us=prior)
        picks: list[int] = []
        while len(picks) < count:
            batch = proposer.propose(8)
            for i in batch:
                proposer.tell(i, times[i])
            picks += batch
        return best_of(times, picks) / optimum

    assert found(close, 16) < 1.15
    assert found(wrong, 144) < 1.2


def test_large_set_is_sampled_not_scanned() -> None:
    configs = [
        Config.of("a", {"p": p, "q": q, "r": r, "s": s})
        for p in range(20)
        for q in range(20)
        for r in range(10)
        for s in range(15)
    ]
    encoding = Encoding(configs)
    assert len(encoding) == 60_000
    seen = search(encoding, [1.0 + float(i % 97) for i in range(60_000)], 0, 64, 16)
    assert len(set(seen)) == 64


def test_expected_improvement_against_sampling() -> None:
    rng = np.random.default_rng(0)
    for mean, std, best in [(0.0, 1.0, 0.5), (1.0, 0.5, 0.0), (-1.0, 2.0, -1.0)]:
        draws = np.maximum(best - rng.normal(mean, std, 400_000), 0).mean()
        exact = log_expected_improvement(np.array([mean]), np.array([std**2]), best)[0]
        assert math.exp(exact) == pytest.approx(draws, rel=0.03)
    z = np.linspace(-40, 20, 2001)
    values = log_expected_improvement(-z, np.ones_like(z), 0.0)
    assert np.isfinite(values).all()
    assert (np.diff(values) > 0).all()


def test_process_interpolates_and_believing_equals_conditioning() -> None:
    rng = np.random.default_rng(1)
    x, groups = rng.random((30, 3)), np.arange(3)
    y = np.sin(4 * x[:, 0]) + 0.3 * x[:, 1]
    y = (y - y.mean()) / y.std()
    hyper = fit(x, groups, y, Hyper.prior(3), 40)
    assert hyper.log_weights[2] < hyper.log_weights[0]  # the third coordinate does not matter
    candidates = rng.random((50, 3))
    posterior = Posterior(x, y, candidates, groups, hyper)
    assert np.abs(Posterior(x, y, x, groups, hyper).mean - y).max() < 0.2
    grown = Posterior(
        np.vstack([x, candidates[4:5]]),
        np.append(y, posterior.mean[4]),
        candidates,
        groups,
        hyper,
    )
    posterior.believe(4)
    np.testing.assert_allclose(posterior.variance, grown.variance, atol=1e-6)
    np.testing.assert_allclose(posterior.mean, grown.mean, atol=1e-6)


def test_believing_many_equals_believing_each() -> None:
    rng = np.random.default_rng(2)
    x, candidates, groups = rng.random((20, 3)), rng.random((60, 3)), np.arange(3)
    y = rng.normal(size=20)
    at_once, one_by_one = (
        Posterior(x, y, candidates, groups, Hyper.prior(3)) for _ in range(2)
    )
    mean = at_once.mean.copy()
    at_once.believe_all(np.array([4, 9, 33]))
    at_once.believe(17)
    for i in (4, 9, 33, 17):
        one_by_one.believe(i)
    np.testing.assert_allclose(at_once.variance, one_by_one.variance, rtol=1e-6)
    np.testing.assert_array_equal(at_once.mean, mean)
