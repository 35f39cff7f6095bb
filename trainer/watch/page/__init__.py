"""`report.html`: one self-contained page about one run, or several laid over each other.

    runs.py      a run folder as data
    figures.py   which curves there are, as data
    chart.py     a figure as HTML and SVG
    panels.py    what a task adds, as figures and tables
    sections.py  the parts of the page that are words and tables
    page.py      the page

No module here needs torch, and the page needs no network: its styles and its script are inside it.
"""

from trainer.watch.page.page import panel_page, write_page
from trainer.watch.page.runs import PANELS

__all__ = ["PANELS", "panel_page", "write_page"]
