"""Rows in the order of their predictions, all in this process."""

from raytrec.common.collectives import Peers
from raytrec.metrics.builtin.auc import AUC
from raytrec.metrics.ranked import RankedRows, Ties, is_binary


def ranked(predictions_N, labels_N):
    """A Ranked of rows that count once each."""
    ties = Ties.of(predictions_N.double(), labels_N, labels_N.new_ones(len(labels_N)))
    return RankedRows.sort(ties, Peers(alone=True), is_binary(labels_N))


def auc_of(predictions_N, labels_N):
    """Their AUC."""
    return float(AUC.figure(AUC.sums(ranked(predictions_N, labels_N))))
