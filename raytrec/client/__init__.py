"""Start and follow runs from outside the cluster: jobs, notebooks and queries; without torch."""
