"""Pictures show the recorded data: the data of each matplotlib artist is compared with the run folder."""

import json
import warnings
from dataclasses import asdict

import matplotlib
import numpy as np
import pytest
from drawn_texts import find_text_collisions
from matplotlib.colors import to_hex
from recorded import PHASE_SECONDS, PHASES, RUN_METRICS, rank_line, write_json_lines, write_recorded_run

from raytrec.common.messages import Eval, Final, Train
from raytrec.metrics.selection import read_metric_displays
from raytrec.report.figures import GALLERY, learning, style, tables, timeline
from raytrec.tracking.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunFolder.read(write_recorded_run(tmp_path_factory.mktemp("run")))


def get_line_points(axes, label):
    """Return the points of the line with this label."""
    (line,) = (line for line in axes.lines if line.get_label() == label)
    return [*map(float, line.get_xdata())], [*map(float, line.get_ydata())]


def test_learning_curves_show_the_recorded_metrics(run):
    ne, loss, auc = learning.curves(run).axes
    assert [axes.get_ylabel() for axes in (ne, loss, auc)] == ["NE", "log loss", "AUC"]
    for axes, name in ((loss, "logloss"), (ne, "ne")):
        for kind, label in ((Train, "training"), (Eval, "evaluation"), (Final, "final evaluation")):
            lines = run.figures(kind)
            assert get_line_points(axes, label) == ([m.step for m in lines], [m.figure(name) for m in lines])
    assert get_line_points(auc, "final evaluation") == ([500], [0.81])
    assert get_line_points(loss, "restart")[0] == [150, 150]


def record_learning_run(folder, train, *others):
    """Record a run of one task with a training loss and metrics."""
    loss = {"key": "loss", "title": "training loss", "label": "loss", "better": "lower", "format": "{:.4f}"}
    loss |= {"sums": True}
    start = {"event": "start", "step": 0, "total": 20, "workers": 1, "metrics": [*RUN_METRICS, loss]}
    folder.mkdir(exist_ok=True)
    write_json_lines(folder / "events.jsonl", [start])
    lines = [{"kind": "train", "step": 10 * n, **figures} for n, figures in enumerate(train, 1)]
    write_json_lines(folder / "metrics.jsonl", [*lines, *others])
    return RunFolder.read(folder)


def test_model_loss_has_a_panel_and_a_full_legend(tmp_path):
    evaluations = [{"kind": "eval", "step": 10, "auc": 0.7}, {"kind": "final", "step": 20, "auc": 0.8}]
    run = record_learning_run(tmp_path, [{"loss": 0.1}, {"loss": 0.05}], *evaluations)
    figure = learning.curves(run)
    above, below = figure.axes
    assert [above.get_ylabel(), below.get_ylabel()] == ["loss", "AUC"]
    assert get_line_points(above, "training") == ([10, 20], [0.1, 0.05])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["training", "evaluation", "final evaluation"]


@pytest.mark.parametrize("factor, labels", [(1.004, ["log loss"]), (1.2, ["log loss", "loss"])])
def test_loss_equal_to_log_loss_has_no_panel(tmp_path, factor, labels):
    run = record_learning_run(tmp_path, [{"logloss": 0.5 / n, "loss": factor * 0.5 / n} for n in range(1, 9)])
    assert [axes.get_ylabel() for axes in learning.curves(run).axes] == labels
    assert len(learning.draw_overlay([run, run], ["a", "b"])) == len(labels)


def test_outlying_first_point_does_not_flatten_the_curve(tmp_path):
    values = [15.2, *(1 - 0.02 * n for n in range(20))]
    run = record_learning_run(tmp_path, [{"ne": ne} for ne in values], {"kind": "eval", "step": 15, "ne": 1.1})
    for figure in (learning.curves(run), learning.draw_overlay([run], ["a"])[0]):
        (axes,) = figure.axes
        low, high = axes.get_ylim()
        assert low < 0.62 and 1 < high < 1.3, "the later points do not fill the panel"
        assert [y for line in axes.lines for y in line.get_ydata() if y > high] == [15.2]
        assert [text.get_text() for text in axes.texts] == ["▲ 15.2"], "the clipped point is not marked"
        assert find_text_collisions(figure) == []
    overlaid = learning.draw_overlay([run] * 7, list("abcdefg"))[0]
    assert len(overlaid.axes[0].texts) == 5 and find_text_collisions(overlaid) == []


@pytest.mark.parametrize(
    "values", [[0.7, 0.65, 0.6, 0.55, 0.5, 0.45], [15.0, 1.0, 0.9], [0.5] * 12, [0.5] * 11 + [9.0]]
)
def test_other_points_are_not_clipped(tmp_path, values):
    """A steady fall, a line of three points, a constant, and a late rise."""
    (axes,) = learning.curves(record_learning_run(tmp_path, [{"ne": ne} for ne in values])).axes
    assert axes.get_ylim()[1] >= max(values) and not axes.texts


def test_metric_with_one_point_is_shown_in_the_title(tmp_path):
    run = record_learning_run(
        tmp_path, [{"ne": 0.9}, {"ne": 0.8}], {"kind": "final", "step": 20, "auc": 0.7, "ne": 0.85}
    )
    figure = learning.curves(run)
    assert [axes.get_ylabel() for axes in figure.axes] == ["NE"]
    assert figure.get_suptitle() == "NE 0.8500, AUC 0.7000 at step 20"
    titles = [picture.get_suptitle() for picture in learning.draw_overlay([run, run], ["a", "b"])]
    assert titles == ["NE in training"]


def test_run_of_one_interval_has_no_pictures_over_steps(tmp_path):
    run = record_learning_run(tmp_path, [{"ne": 0.9, "calibration": 1.0, "rows_per_s": 5.0}])
    write_json_lines(tmp_path / "ranks.jsonl", [rank_line(["t"], 0, 1, 100)])
    run = RunFolder.read(tmp_path)
    over_steps = learning.curves, learning.ratios, timeline.draw_throughput, tables.health
    assert [draw(run) for draw in over_steps] == [None] * 4


def test_reliability_and_roc_show_the_last_evaluation(run, tmp_path):
    written = run.figures(Final)[-1].curves
    above, below = learning.reliability(run).axes
    points = written["reliability"]
    assert get_line_points(above, "this model") == (points["predicted"], points["actual"])
    bars = [segment[1][1] for segment in below.collections[0].get_segments()]
    assert bars == points["rows"]
    figure = learning.roc(run)
    (axes,) = figure.axes
    assert figure.get_suptitle() == "ROC at step 500: AUC 0.8100"
    assert get_line_points(axes, "this model") == (written["roc"]["fpr"], written["roc"]["tpr"])
    figure = learning.ratios(run)
    (axes,) = figure.axes
    assert figure.get_suptitle() == "Calibration 1.0020 at step 500" and axes.get_ylabel() == "calibration"
    assert axes.lines[0].get_ydata() == [1, 1]
    assert get_line_points(axes, "training")[1] == [m.figure("calibration") for m in run.figures(Train)]


def test_tasks_have_separate_panels_and_curves(tmp_path):
    write_recorded_run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().replace('"metric": "auc"', '"metric": "click.auc"')
    names = "auc", "ne", "logloss", "calibration", "roc", "reliability"
    for name in names:
        lines = lines.replace(f'"{name}":', f'"click.{name}":')
    written = [json.loads(line) | {"like.mae": 5.0} for line in lines.splitlines()]
    for curves in (line["curves"] for line in written if "curves" in line):
        of_click = {name.replace("click", "like"): curve for name, curve in curves.items()}
        curves |= {name: curve | {"metric": "like.x"} for name, curve in of_click.items()}
    write_json_lines(tmp_path / "metrics.jsonl", written)
    described = [asdict(figure) for figure in read_metric_displays() if figure.key in (*names, "mae")]
    for each in described:
        task = "like" if each["key"] == "mae" else "click"
        each |= {"key": f"{task}.{each['key']}", "label": f"{task}: {each['label']}"}
    start = {"event": "start", "total": 500, "step": 0, "workers": 2, "metrics": described}
    write_json_lines(tmp_path / "events.jsonl", [start])
    run = RunFolder.read(tmp_path)
    panels = {axes.get_ylabel() for axes in learning.curves(run).axes}
    assert panels == {"click: NE", "click: log loss", "click: AUC", "like: MAE"}
    assert [axes.get_ylabel() for axes in learning.ratios(run).axes] == ["click: calibration"]
    figure = learning.roc(run)
    assert {line.get_label() for line in figure.axes[0].lines} == {"chance", "click", "like"}
    assert "click: AUC 0.8100" in figure.get_suptitle().replace("\n", " ")
    above = learning.reliability(run).axes[0]
    assert {line.get_label() for line in above.lines} == {"perfect calibration", "click", "like"}


def test_maps_show_bytes_and_load_of_each_table_on_each_rank(run):
    memory = tables.draw_memory(run)
    grid = memory.axes[1]
    assert [t.get_text() for t in grid.get_yticklabels()] == ["table_2", "table_1", "table_0"]
    bytes_of = {"table_2": [300 * 68, 0], "table_1": [0, 200 * 68], "table_0": [50 * 68, 50 * 68]}
    cells = grid.images[0].get_array()
    assert np.array_equal(cells.filled(0), list(bytes_of.values()))
    assert [bar.get_height() for bar in memory.axes[0].patches] == [350 * 68, 250 * 68]
    assert "39.8 KiB on 2 ranks, 16.6 KiB to 23.2 KiB each" in memory.get_suptitle().replace("\n", " ")

    load = tables.draw_load(run)
    cells = load.axes[1].images[0].get_array().filled(0)
    assert np.allclose(cells, np.array([[3, 0], [1, 1], [0, 2]]) / 7)
    assert "rank 0 looks up 57 % of all bytes" in load.get_suptitle()


def test_maps_of_many_tables_group_the_small_ones(tmp_path):
    run = RunFolder.read(write_recorded_run(tmp_path, tables=200, ranks=64, intervals=1))
    made = tables.draw_memory(run)
    cells = made.axes[1].images[0].get_array().filled(0)
    assert cells.shape == (41, 64)
    assert made.axes[1].get_yticklabels()[-1].get_text() == "160 other tables"
    rows = 100 * sum(range(1, 201)) - 100 + 64 * (100 // 64)  # table 0 is cut into 64 parts of 1 row
    assert cells.sum() == 68 * rows
    assert len(made.axes[1].texts) == 0  # there are too many cells for labels
    size = made.get_size_inches()
    assert size[0] == style.WIDTH and size[1] < 12


def test_map_of_one_table_on_one_rank_labels_its_cell(tmp_path):
    run = RunFolder.read(write_recorded_run(tmp_path, tables=1, ranks=1))
    for draw, text in ((tables.draw_memory, "6.64 KiB"), (tables.draw_load, "100 %")):
        assert [t.get_text() for t in draw(run).axes[1].texts] == [text]


def test_map_shows_only_the_last_worker_group(tmp_path):
    before = [rank_line(["a", "b"], rank, 3, 100) for rank in range(3)]
    after = [rank_line(["a", "b"], rank, 2, 200, attempt=1) for rank in range(2)]
    write_json_lines(tmp_path / "ranks.jsonl", before + after)
    assert tables.draw_memory(RunFolder.read(tmp_path)).axes[1].images[0].get_array().shape == (2, 2)


def test_phase_charts_show_milliseconds_per_step(run):
    (axes,) = timeline.draw_phase_totals(run).axes
    widths = {c.get_label(): [bar.get_width() for bar in c] for c in axes.containers}
    names = [phase.replace("_", " ") for phase in PHASES]
    assert widths == {name: pytest.approx([10 * s] * 2) for name, s in zip(names, PHASE_SECONDS, strict=True)}
    assert [t.get_text() for t in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    first, second = timeline.draw_phases_over_steps(run).axes
    assert (first.get_title("left"), second.get_title("left")) == ("rank 0", "rank 1")
    stairs = {patch.get_label(): patch.get_data() for patch in first.patches}
    assert np.allclose(stairs["backward"].edges, [0, 100, 200, 300, 400, 500])
    assert np.allclose(stairs["backward"].values - stairs["backward"].baseline, 12)
    assert np.allclose(stairs["other"].values, 35)


def test_phase_chart_title_names_the_straggler(tmp_path):
    lines = [rank_line(["a"], rank, 3, step) for step in (100, 200) for rank in range(3)]
    for line in lines:
        line["seconds"] = 73.5
        line["phases_s"]["data" if line["rank"] == 2 else "collectives"] += 70.0
    write_json_lines(tmp_path / "ranks.jsonl", lines)
    made = timeline.draw_phase_totals(RunFolder.read(tmp_path))
    assert made.get_suptitle() == "Time of a step: rank 2 is slow"


def test_phase_chart_shows_only_the_16_busiest_ranks(tmp_path):
    lines = [rank_line(["a"], rank, 32, 100) for rank in range(32)]
    for line in lines:
        line["phases_s"]["forward"] += line["rank"] / 100
        line["phases_s"]["collectives"] -= line["rank"] / 100
    write_json_lines(tmp_path / "ranks.jsonl", lines)
    made = timeline.draw_phase_totals(RunFolder.read(tmp_path))
    labels = [t.get_text() for t in made.axes[0].get_yticklabels()]
    assert labels == [f"rank {rank}" for rank in range(31, 15, -1)]
    assert "the 16 of 32 ranks" in made.get_suptitle().replace("\n", " ")


def test_row_norm_chart_shows_shares_of_rows_per_step(run):
    made = tables.draw_row_norms(run)
    panels = {axes.get_title("left"): axes for axes in made.axes}
    mesh = panels["table_2"].collections[0]
    counts = np.array(run.ranks[0].tables["table_2"]["row_norm_counts"])
    assert np.allclose(mesh.get_array(), np.repeat((counts / counts.sum())[:, None], 5, axis=1))
    corners = mesh.get_coordinates()
    assert np.allclose(corners[0, :, 0], [50, 150, 250, 350, 450, 550])
    assert np.allclose(corners[:, 0, 1], np.logspace(-4, 2, 31))


def test_health_chart_labels_the_highest_tables(tmp_path):
    lines = [rank_line([f"t{i}" for i in range(8)], 0, 1, step) for step in (100, 200)]
    for line in lines:
        for i in range(8):
            line["tables"][f"t{i}"]["dead_share"] = i / 10
    write_json_lines(tmp_path / "ranks.jsonl", lines)
    axes = tables.health(RunFolder.read(tmp_path)).axes[0]
    assert sorted(line.get_ydata()[-1] for line in axes.lines) == pytest.approx([i / 10 for i in range(8)])
    assert [text.get_text() for text in axes.get_legend().texts] == ["t7", "t6", "t5", "t4", "t3"]
    colours = {to_hex(handle.get_color()) for handle in axes.get_legend().legend_handles}
    assert len(colours) == 5 and style.GREY not in colours


def test_check_chart_marks_passed_and_failed_checks(run):
    made = timeline.checks(run)
    (axes,) = made.axes
    passed, failed = (next(c for c in axes.collections if c.get_label() == x) for x in ("passed", "failed"))
    assert len(passed.get_offsets()) == 29
    assert [t.get_text() for t in axes.get_yticklabels()][2] == "parity"
    assert np.array_equal(failed.get_offsets(), [[300, 2]])
    assert made.get_suptitle() == "Checks: 1 of 30 failed: parity at step 300"


def test_timeline_shows_workers_steps_and_failures(run):
    made = timeline.draw_elastic_timeline(run)
    workers, steps = made.axes
    assert [(b.get_x(), b.get_width(), b.get_height()) for b in workers.patches] == [(0, 9, 2), (20, 14, 2)]
    marks = {c.get_label(): c.get_offsets().tolist() for c in steps.collections}
    assert marks == {"failure": [[9, 220]], "saved": [[6, 150], [34, 500]]}
    assert made.get_suptitle() == "The run: 34 s, 2 workers, 1 failure, 1 restart"
    first, again = (line.get_ydata() for line in steps.lines)
    assert (first[0], max(first), again[0], again[-1]) == (0, 220, 150, 500)


def test_throughput_chart_shows_rows_per_second(run):
    (axes,) = timeline.draw_throughput(run).axes
    assert axes.lines[0].get_ydata() == pytest.approx([60_000] * 25)


@pytest.mark.slow
def test_pictures_use_the_style_and_restore_rcparams(run):
    for picture in GALLERY:
        made = picture.draw(run)
        assert made.get_size_inches()[0] == style.WIDTH, picture.name
        assert made.get_suptitle(), picture.name
        style.to_svg(made, picture.label)
    for key in style.STYLE:
        assert matplotlib.rcParams[key] == matplotlib.rcParamsDefault[key], key


LONG_NAMES = ["W" * 30, "item_brand_and_manufacturer", "campaign_" + "w" * 20, "类" * 30, "a"]


@pytest.mark.slow
@pytest.mark.parametrize("names, ranks", [(LONG_NAMES, 1), (LONG_NAMES[:2], 4), (LONG_NAMES, 40)])
def test_texts_in_pictures_do_not_overlap(tmp_path, names, ranks):
    run = RunFolder.read(write_recorded_run(tmp_path, names=names, ranks=ranks))
    with warnings.catch_warnings(action="ignore"):  # missing glyphs
        for draw in (
            tables.draw_row_norms,
            tables.health,
            tables.draw_memory,
            tables.draw_load,
            timeline.draw_phases_over_steps,
        ):
            assert find_text_collisions(draw(run)) == []


def test_long_names_are_shortened_in_the_middle():
    assert style.fit_name("user_id", 90) == "user_id"
    assert style.fit_name("w" * 40, 90) == "wwwwwww…wwwwww"
    assert len(style.fit_name("i" * 40, 90)) > 2 * len(style.fit_name("W" * 40, 90))
    assert style.fit_name("abcd", 0) == "a…d"


def test_long_lines_are_averaged_over_neighbors():
    xs, ys = style.thin_line(list(range(2500)), [float(x) for x in range(2500)])
    assert len(xs) == 834 and xs[-1] == 2499
    assert (xs[0], ys[0]) == (2, 1.0)
    assert style.thin_line([1, 2], [3, 4]) == ([1, 2], [3, 4])
