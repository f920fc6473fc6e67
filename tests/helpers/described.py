"""Comparison of a service's answers with its OpenAPI document."""

import json

import jsonschema


def iterate_references(value):
    """Yield every $ref in a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from iterate_references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from iterate_references(inner)


def resolve(document, value):
    """Return a value, or the part of the document to which it refers."""
    if "$ref" not in value:
        return value
    for part in value["$ref"].removeprefix("#/").split("/"):
        document = document[part]
    return document


def find_template(document, path):
    """Return the path of the document that a path matches."""
    parts = path.split("?")[0].split("/")
    for template in sorted(document["paths"], key=lambda each: each.count("{")):
        known = template.split("/")
        if len(known) == len(parts) and all(a == b or a[:1] == "{" for a, b in zip(known, parts, strict=True)):
            return template
    raise AssertionError(f"{path} is not described")


def assert_described(document, method, path, status, content, headers, body=None):
    """Assert that an answer, and the JSON body of a successful request, match the document.

    Args:
        document: OpenAPI document.
        method: method in lower case.
        path: path of the request.
        status: HTTP status of the answer.
        content: body of the answer.
        headers: headers of the answer.
        body: values of the request's JSON body.
    """
    operation = document["paths"][find_template(document, path)][method]
    responses = operation["responses"]
    assert str(status) in responses, f"{path} does not describe status {status}"
    response = resolve(document, responses[str(status)])
    for name, header in response.get("headers", {}).items():
        assert name in headers or not header.get("required"), f"{path}: {name} is missing"
    kind = headers["Content-Type"].partition(";")[0]
    assert kind in response["content"], f"{path} does not describe {kind}"
    if kind.startswith("text/") or kind == "application/json":
        values = json.loads(content) if kind == "application/json" else content.decode()
        assert_valid(document, values, response["content"][kind]["schema"])
    if body is not None and status == 200:
        assert_valid(document, body, operation["requestBody"]["content"]["application/json"]["schema"])


def assert_valid(document, values, schema):
    """Assert that values match a schema of the document."""
    jsonschema.validate(values, schema | {"components": document["components"]}, jsonschema.Draft202012Validator)
