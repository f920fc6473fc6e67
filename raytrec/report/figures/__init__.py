"""Pictures of a run: functions from RunFolder to Figure. Each gives None without data."""
