"""Tables of a page, written from result files.

A table stands between `<!-- NAME -->` and `<!-- end -->`; everything else on the page is written by
hand.
"""

import re
from collections.abc import Mapping, Sequence


def filled(text: str, tables: Mapping[str, Sequence[str]]) -> str:
    """The page with its tables written anew."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n" + "\n".join(tables[match[1]]) + "\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.S)
