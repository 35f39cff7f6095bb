"""The page shows what is in the result files."""

from benchmarks.repacking import page


def test_the_tables_are_up_to_date():
    text = page.PAGE.read_text()
    assert text.count("<!-- end -->") == len(page.tables())
    assert text == page.page(text)
