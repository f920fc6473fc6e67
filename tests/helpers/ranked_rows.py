"""Rows sorted by prediction, in one process."""

from raytrec.common.collectives import Peers
from raytrec.metrics.builtin.ranking import AUC
from raytrec.metrics.ranked import RankedRows, Ties, is_binary


def rank_rows(predictions_N, labels_N):
    """Return the RankedRows of predictions and labels with weight 1."""
    ties = Ties.of(predictions_N.double(), labels_N, labels_N.new_ones(len(labels_N)))
    return RankedRows.sort(ties, Peers(alone=True), is_binary(labels_N))


def auc_of_predictions(predictions_N, labels_N):
    """Return the AUC of predictions and labels."""
    return float(AUC.figure(AUC.sums(rank_rows(predictions_N, labels_N))))
