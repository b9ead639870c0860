"""What a benchmark's table is read for: fronts, speed-ups, the published points beside it. Times themselves are not tested."""

import pandas as pd

from mla_lab import bench, plots


def table():
    shape = dict(model="GLM-5.3-Flash TP4", topk=2048, indices="random", heads=16)
    rows = [
        ("decode", 16, "cold", "bf16", "bf16", 16.0, 0.002), ("decode", 16, "warm", "bf16", "bf16", 14.0, 0.002),
        ("decode", 16, "cold", "fp8_scalar", "bf16", 17.0, 0.026), ("decode", 16, "cold", "fp8_scalar", "fp8", 8.0, 0.043),
        ("prefill", 16384, "warm", "bf16", "bf16", 7000.0, 0.002), ("prefill", 16384, "warm", "fp8_scalar", "bf16", 5000.0, 0.026),
        ("prefill", 16384, "warm", "fp8_scalar", "fp8", 3500.0, 0.043), ("prefill", 16384, "warm", "fp8_scalar", "bf16 QK, fp8 PV", 5000.0, 0.03),
    ]
    frame = pd.DataFrame(rows, columns=["phase", "tokens", "l2", "cache", "recipe", "median_us", "total_error"]).assign(**shape)
    return frame.assign(kernel_error=frame.total_error / 2, gather_us=frame.median_us / 2)


def test_the_front_has_what_nothing_beats_in_its_phase():
    shown = table().query("l2 == 'cold' or phase == 'prefill'")
    on = shown[bench.front(shown)]
    assert on[on.phase == "decode"].median_us.tolist() == [16.0, 8.0]  # 17 us at 2.6% is beaten by 16 us at 0.2%
    assert on[on.phase == "prefill"].median_us.tolist() == [7000.0, 5000.0, 3500.0]  # as fast with more error is beaten
    assert bench.front(shown.assign(total_error=0.01, median_us=1.0)).all()  # equals beat none of each other


def test_speedups_are_against_bf16_in_the_same_state_of_the_l2():
    cold = bench.speedups(table(), "cold").set_index(["phase", "cache", "recipe"]).times_as_fast
    assert cold["decode", "fp8_scalar", "fp8"] == 2.0 and cold["prefill", "fp8_scalar", "fp8"] == 2.0 and len(cold) == 5
    assert bench.speedups(table(), "warm").phase.tolist() == ["prefill"] * 3  # nothing but bf16 was timed warm in decode


def test_published_points_have_time_and_error_of_the_same_dots():
    found = bench.published_points((16, 0, 2048)).set_index(["phase", "tokens", "dots"])
    assert found.loc[("prefill", 16384, "fp8")][["latency_us", "low", "high"]].tolist() == [5780.0, 0.034, 0.034]
    assert found.loc[("decode", 2, "bf16")][["latency_us", "low", "high"]].tolist() == [30.7, 0.002, 0.003]
    assert bench.published_points((128, 64, 2048)).empty


def test_published_points_are_drawn_hollow_and_only_beside_their_own_shape():
    shown = table().query("l2 == 'cold' or phase == 'prefill'")
    figure = plots.latency_against_accuracy(shown.assign(front=bench.front(shown)), bench.published_points((16, 0, 2048)), "a test")
    hollow = [[c for c in axes.collections if c.get_facecolors().size == 0] for axes in figure.axes]
    assert [len(h) for h in hollow] == [2, 2]
    assert all(tuple(c.get_edgecolors()[0][:3]) == (0, 0, 0) for h in hollow for c in h)
    assert "a test" in figure.get_suptitle() and all(axes.get_xlabel().startswith("time of a call (") for axes in figure.axes)
    grown = plots.time_against_tokens(shown, "a test")
    assert [axes.get_ylabel() for axes in grown.axes] == ["time of a call (us)"] * 2
