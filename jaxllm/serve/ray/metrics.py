"""GET /metrics of all replicas as one page."""

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{(.*)\})? ", re.MULTILINE)


def merge_metrics(pages: Mapping[str, str]) -> str:
    """The replicas' pages in one, each sample with the label `replica`.

    Args:
        pages: of each replica, in Prometheus's text format, every family with its # HELP line.
    """
    families: dict[str, list[str]] = {}
    for replica, page in sorted(pages.items()):
        for block in re.split(r"^(?=# HELP )", page, flags=re.MULTILINE)[1:]:
            lines = block.splitlines(keepends=True)
            head = "".join(line for line in lines if line.startswith("#"))
            samples = "".join(line for line in lines if not line.startswith("#"))
            families.setdefault(head, []).append(_SAMPLE.sub(_labelled(replica), samples))
    return "".join(head + "".join(samples) for head, samples in families.items())


def _labelled(replica: str) -> str:
    return rf'\1{{replica="{replica}",\2}} '
