"""`fleetcast evaluate interference`: how fast jobs run when they share a GPU, compared with baselines.

    unseen_pair     both models are in the train folder, but this pair is not
    unseen_family   a model of the pair is not in the train folder

If one folder serves as both, a fifth of the pairs, and each family of models in turn, are left out of the fit.

Three co-runs of each job of an unseen family are revealed to some methods, and no method is judged on
them. Ours is the model of the service (fleetcast.models.jobs.interference):

    ours              a site whose own co-runs are those of the train folder (the newest that it stores)
    ours_3_co_runs    and three co-runs of each new job (a configuration: model, data set, batch size, precision)
    ours_3_of_model   and three of each new model in all, whatever its configurations
    new_site, new_site_3_co_runs, new_site_3_of_model   the same of a site that has no other co-runs
    rule              min(1, 1 / (u1 + u2));  constant   the mean speed of the train folder
    trees             the rule and trees for its errors, fitted on the train folder (no trees ship)
    lucid_label       accepts where the sum of labels is at most 2; they come from measured co-runs
    sum_100           accepts where u1 + u2 <= 100
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.co_runs import MOST_CO_RUNS
from fleetcast.models.jobs.interference import (
    Pairs,
    Prediction,
    compute_gpu_prior,
    compute_published_rule,
    fit_residuals,
    predict_speeds,
)
from fleetcast.training.reports.results import ResultRow, Results, compute_interval
from fleetcast.training.sets.co_run_sets import CoRunPairs, CoRunSet, find_family, read_co_run_sets

Array = NDArray[np.float64]
Say = Callable[[str], None]

HARM = 0.85
ACCEPTED = 0.73
CO_RUNS = 3
FOLDS = 5
TREES = 200
FEWEST = 40  # rows to fit on
BOUND = "|bound"
ACCEPTING = ("label", "load")  # no speeds: what rules of yes and no look at


def evaluate(train: Path, test: Path, seed: int, say: Say) -> Results:
    """Evaluate every set of co-runs that is in both folders."""
    results = Results("interference")
    for one in read_co_run_sets(train, test, results.skipped):
        for reason, count in sorted(one.left_out.items()):
            say(f"{one.dataset}: left out {count:,} co-runs: {reason}")
        evaluate_set(results, one, seed, say)
    return results


def evaluate_set(results: Results, one: CoRunSet, seed: int, say: Say) -> None:
    """Add the rows of one set, for unseen pairs and for unseen families."""
    found: dict[str, list[tuple[CoRunPairs, dict[str, Array]]]] = {}
    for target, fitted, judged, new in make_splits(one, seed):
        if len(fitted) < FEWEST or not len(judged):
            results.skipped.append(f"{one.dataset} {target}: {len(fitted)} rows to fit on, {len(judged)} to judge")
            continue
        of = f" of {', '.join(sorted(new))}" if new else ""
        say(f"{one.dataset} {target}: fitting on {len(fitted):,} rows, judging {len(judged):,}{of}")
        found.setdefault(target, []).append(predict_by_methods(fitted, judged, new, seed))
    for target, parts in found.items():
        judge_target(results, one.dataset, target, parts, seed)


def make_splits(one: CoRunSet, seed: int) -> list[tuple[str, CoRunPairs, CoRunPairs, set[str]]]:
    """Return the splits of a set: (target, rows to fit on, rows to judge, new models).

    The new models are those that only the judged rows have.
    """
    rows, found = one.rows, []
    train, test = rows.select_rows(~one.in_test), rows.select_rows(one.in_test)
    if len(test):
        seen = test.select_rows(~test.has_any_model(one.new_models)) if one.new_models else test
        found.append(("unseen_pair", train, seen, set[str]()))
    else:
        fold = np.random.default_rng(seed).integers(0, FOLDS, int(rows.pair.max()) + 1)[rows.pair]
        found += [
            ("unseen_pair", rows.select_rows(fold != k), rows.select_rows(fold == k), set[str]()) for k in range(FOLDS)
        ]
    if one.new_models:
        found.append(("unseen_family", train, test.select_rows(test.has_any_model(one.new_models)), one.new_models))
        return found
    judged = test if len(test) else rows
    for models in _group_models_by_family(judged):
        found.append(
            (
                "unseen_family",
                train.select_rows(~train.has_any_model(models)),
                judged.select_rows(judged.has_any_model(models)),
                models,
            )
        )
    return found


def _group_models_by_family(rows: CoRunPairs) -> list[set[str]]:
    """Group the models by family. Returns the models of each family."""
    groups: dict[str, set[str]] = {}
    for model in sorted({*rows.model.tolist(), *rows.partner_model.tolist()}):
        groups.setdefault(find_family(model), set()).add(model)
    return list(groups.values())


def predict_by_methods(
    fitted: CoRunPairs, judged: CoRunPairs, new: set[str], seed: int
) -> tuple[CoRunPairs, dict[str, Array]]:
    """Return the rows to judge without the revealed co-runs, and method → (row,) predicted speeds.

    The entries `…|bound` are the lower bounds of these speeds. new: models that are not in the fitted
    rows.
    """
    shown = draw_revealed_co_runs(judged, new, seed)
    rest, of_jobs = judged.select_rows(~shown), judged.select_rows(shown)
    of_models = judged.select_rows(shown & draw_for_each_model(judged, shown, new, seed))
    found = {
        "rule": compute_published_rule(rest.pairs.load[:, 0], rest.pairs.partner_load[:, 0]),
        "constant": np.full(len(rest), fitted.speed.mean()),
        "trees": fit_error_trees(fitted, seed)(rest.pairs),
        "label": -rest.label,
        "load": -(rest.pairs.load[:, 0] + rest.pairs.partner_load[:, 0]),
    }
    nothing = fitted.select_rows(np.zeros(len(fitted), bool))
    for method, site in (("ours", fitted), ("new_site", nothing)):
        kinds = {"": nothing, "_3_co_runs": of_jobs, "_3_of_model": of_models}
        for suffix, more in kinds.items():
            if suffix and not len(more):
                continue
            said = _predict_as_served(_limit_co_runs(site, more, seed), rest)
            found[method + suffix], found[method + suffix + BOUND] = said.p50, said.lower_90
    return rest, found


def _predict_as_served(seen: CoRunPairs, asked: CoRunPairs) -> Prediction:
    """Predict speeds with the service's own model. seen: co-runs that the site has measured."""
    return predict_speeds(
        asked.pairs,
        compute_gpu_prior(asked.pairs),
        fit_residuals(seen.pairs, seen.speed - compute_gpu_prior(seen.pairs)),
    )


def _limit_co_runs(site: CoRunPairs, newest: CoRunPairs, seed: int) -> CoRunPairs:
    """Return a site's co-runs, limited to the number that the service stores.

    newest: co-runs that all remain. If there are too many in total, some of the others are dropped at random.
    """
    order = np.random.default_rng(seed).permutation(len(site))
    return _concatenate_co_runs(site.select_rows(np.sort(order[: max(0, MOST_CO_RUNS - len(newest))])), newest)


def _concatenate_co_runs(one: CoRunPairs, other: CoRunPairs) -> CoRunPairs:
    pairs = Pairs(
        *(np.concatenate([getattr(rows.pairs, name) for rows in (one, other)]) for name in Pairs.__dataclass_fields__)
    )
    names = [name for name in CoRunPairs.__dataclass_fields__ if name != "pairs"]
    return CoRunPairs(pairs, *(np.concatenate([getattr(rows, name) for rows in (one, other)]) for name in names))


def draw_revealed_co_runs(judged: CoRunPairs, new: set[str], seed: int) -> NDArray[np.bool_]:
    """Draw the co-runs that are revealed to some methods. Returns (row,) whether a row is revealed.

    They are CO_RUNS co-runs of each configuration of a new model, but at most half of the
    configuration's co-runs.
    """
    rng = np.random.default_rng(seed)
    own = np.isin(judged.model, list(new))
    drawn: set[int] = set()
    for config in rng.permutation(np.unique(judged.pairs.keys[own, 0])):
        mine = rng.permutation(np.unique(judged.pair[judged.pairs.keys[:, 0] == config])).tolist()
        lacks = min(CO_RUNS, len(mine) // 2) - len(drawn.intersection(mine))
        drawn.update([pair for pair in mine if pair not in drawn][: max(0, lacks)])
    return np.asarray(np.isin(judged.pair, list(drawn)))


def draw_for_each_model(judged: CoRunPairs, shown: NDArray[np.bool_], new: set[str], seed: int) -> NDArray[np.bool_]:
    """Draw CO_RUNS of the revealed co-runs of each new model. Returns (row,) whether a row is drawn.

    shown: (row,) whether a row is revealed.
    """
    rng = np.random.default_rng(seed)
    drawn = [
        rng.permutation(np.unique(judged.pair[shown & ((judged.model == model) | (judged.partner_model == model))]))
        for model in sorted(new)
    ]
    return np.asarray(np.isin(judged.pair, [pair for pairs in drawn for pair in pairs[:CO_RUNS].tolist()]))


def compute_features(pairs: Pairs) -> Array:
    """Return (n, feature) both jobs' loads, their sums and products, and the rule: inputs of error trees."""
    (u, m, memory), (v, w, partner_memory) = pairs.load.T, pairs.partner_load.T
    both = np.maximum(u + v, 1e-6)
    columns = [u, v, m, w, memory, partner_memory, u + v, np.maximum(0, u + v - 1), m + w, np.maximum(0, m + w - 1)]
    return np.column_stack(
        [*columns, u * v, m * w, v / both, w / np.maximum(m + w, 1e-6), compute_published_rule(u, v)]
    )


def fit_error_trees(fitted: CoRunPairs, seed: int) -> Callable[[Pairs], Array]:
    """Fit extremely randomised trees (Geurts et al., 2006) on the errors of the rule.

    Returns a function that predicts the rule plus these trees.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    def predict_by_rule(pairs: Pairs) -> Array:
        return compute_published_rule(pairs.load[:, 0], pairs.partner_load[:, 0])

    model = ExtraTreesRegressor(TREES, min_samples_leaf=5, max_features=0.5, random_state=seed, n_jobs=1)
    model.fit(compute_features(fitted.pairs), fitted.speed - predict_by_rule(fitted.pairs))
    return lambda pairs: predict_by_rule(pairs) + model.predict(compute_features(pairs)) if len(pairs) else np.zeros(0)


def judge_target(
    results: Results, dataset: str, target: str, parts: list[tuple[CoRunPairs, dict[str, Array]]], seed: int
) -> None:
    """Add the rows of all methods for one target.

    parts: the rows of each fit with their predictions. All parts are judged together.
    """
    names = [name for name in parts[0][1] if all(name in found for _, found in parts)]
    methods = {name: np.concatenate([found[name] for _, found in parts]) for name in names}
    speed = np.concatenate([rows.speed for rows, _ in parts])
    pair = np.concatenate([rows.pair + 1_000_000 * n for n, (rows, _) in enumerate(parts)])
    model = np.concatenate([rows.model for rows, _ in parts])
    _judge_series(results, (dataset, target, "all"), methods, speed, pair, seed)
    for name in sorted(set(model.tolist())) if target == "unseen_family" else ():
        own = model == name
        found = {method: said[own] for method, said in methods.items() if method not in ACCEPTING}
        _judge_series(results, (dataset, target, name), found, speed[own], pair[own], seed)
    _add_predictions(results, dataset, target, methods, speed)


def _judge_series(
    results: Results,
    of: tuple[str, str, str],
    methods: Mapping[str, Array],
    speed: Array,
    pair: NDArray[np.int64],
    seed: int,
) -> None:
    """Add the rows of all methods for one series.

    of: (data set, target, series). pair: (row,) the number of the co-run, which two rows share.
    """

    def add_row(method: str, metric: str, top: Array, below: Array | None = None) -> None:
        value, low, high = compute_interval(top, below, block=4, seed=seed)
        if value is not None:
            results.rows.append(ResultRow(*of, None, method, method, metric, value, low, high, len(top)))

    order = np.argsort(pair, kind="stable")
    for method in [name for name in methods if name not in ACCEPTING and not name.endswith(BOUND)]:
        add_row(method, "mae", np.abs(methods[method] - speed)[order])
        add_row(method, "auc_085", _compute_auc_parts(methods[method], speed < HARM))
        add_row(method, "harmful_at_73", *_measure_accepted_harm(methods[method], speed, order))
        if method + BOUND in methods:
            bound = methods[method + BOUND]
            is_within = np.where(np.isfinite(bound), speed >= bound, np.nan)
            add_row(method, "coverage_lower_90", is_within[order])
            if of[2] == "all" and not np.isfinite(bound).any():
                results.skipped.append(f"{of[0]} {of[1]}: {method} has too few co-runs for a bound")
    if "label" in methods and np.isfinite(methods["label"]).all():
        _judge_rule(add_row, "lucid_label", methods["label"] >= -2, methods["label"], speed, order)
    if "load" in methods:
        _judge_rule(add_row, "sum_100", methods["load"] >= -1, methods["load"], speed, order)


def _compute_auc_parts(said: Array, harmed: NDArray[np.bool_]) -> Array:
    """Return (harmed row,) the share of unharmed rows whose predicted speed is higher than that of the harmed row.

    said: (row,) predicted speeds. The mean of these shares is the area under the ROC curve.
    """
    fine = np.sort(said[~harmed])
    if not len(fine):
        return np.zeros(0)
    at = [np.searchsorted(fine, said[harmed], side) for side in ("left", "right")]
    return 1 - (at[0] + at[1]) / (2 * len(fine))


def _measure_accepted_harm(said: Array, speed: Array, order: NDArray[np.intp]) -> tuple[Array, Array]:
    """Accept the 73 % of the rows with the highest predicted speeds.

    Returns (row,) whether a row is harmed and accepted, and (row,) whether it is accepted. At a tie,
    each row is accepted in part.
    """
    count = ACCEPTED * len(said)
    edge = np.sort(said)[::-1][max(0, round(count) - 1)]
    above, tied = said > edge, said == edge
    share = above + tied * (count - above.sum()) / tied.sum()
    return (share * (speed < HARM))[order], share[order]


def _judge_rule(
    add: Callable[[str, str, Array, Array | None], None],
    method: str,
    accepted: NDArray[np.bool_],
    said: Array,
    speed: Array,
    order: NDArray[np.intp],
) -> None:
    """Evaluate a rule that accepts or refuses a co-run, without predicting its speed.

    The metrics are the share of co-runs that it accepts, the harmed share of those, and the harmed
    share at an acceptance of 73 %.
    """
    add(method, "accepted_share", accepted.astype(np.float64)[order], None)
    if accepted.any():
        add(
            method,
            "harmful_accepted",
            (accepted & (speed < HARM)).astype(np.float64)[order],
            accepted[order].astype(np.float64),
        )
    add(method, "auc_085", _compute_auc_parts(said, speed < HARM), None)
    add(method, "harmful_at_73", *_measure_accepted_harm(said, speed, order))


def _add_predictions(results: Results, dataset: str, target: str, methods: Mapping[str, Array], speed: Array) -> None:
    for method in ("ours", "ours_3_co_runs"):
        if method in methods:
            n = len(speed)
            results.predictions.append(
                {
                    "dataset": [dataset] * n,
                    "job": list(range(n)),
                    "target": [target] * n,
                    "series": ["all"] * n,
                    "quantile": [0.5] * n,
                    "value": methods[method].tolist(),
                    "actual": speed.tolist(),
                    "model": [method] * n,
                }
            )
