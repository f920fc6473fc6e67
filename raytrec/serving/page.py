"""The service's page: HTML without data, which it asks for with the token that a reader gives."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@cache
def make_page() -> tuple[str, dict[str, str]]:
    """(HTML, headers). A browser runs its script and style alone, asks this service alone, and shows it in no
    other page's frame."""
    loader = ChoiceLoader([PackageLoader("raytrec.serving"), PackageLoader("raytrec.report")])
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    style = "\n" + pages.get_template("style.css").render() + "\n" + pages.get_template("page.css").render()
    script = "\n" + pages.get_template("page.js").render()
    html = pages.get_template("page.html.j2").render(style=Markup(style), script=Markup(script))
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html, {
        "Content-Security-Policy": "; ".join(f"{what} {allowed}" for what, allowed in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
