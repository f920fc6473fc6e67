"""Files with a JSON value per line."""

import json


def read_json_lines(path, kind=None):
    """Return the values of a file, optionally only messages of one kind."""
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if kind in (None, line.get("kind", line.get("event")))]
