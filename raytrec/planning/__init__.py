"""Which rank holds which part of which table; memory and time of a step under that plan."""
