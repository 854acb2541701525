"""Amounts of money as whole cents. No floats anywhere."""

import re

AMOUNT = re.compile(r"^(?P<sign>[+-]?)(?P<whole>\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<cents>\d{1,2}))?$")


def parse_amount(text):
    """Cents from text such as "12", "1,234.5" or "-0.50". Blanks around the number are allowed."""
    match = AMOUNT.match(text.strip())
    if match is None:
        raise ValueError(f"not an amount: {text!r}")
    whole = int(match["sign"] + match["whole"].replace(",", ""))
    cents = int((match["cents"] or "0").ljust(2, "0"))
    return whole * 100 + cents


def format_cents(cents):
    """The inverse of parse_amount: 123450 becomes "1,234.50"."""
    sign = "-" if cents < 0 else ""
    whole, rest = divmod(abs(cents), 100)
    return f"{sign}{whole:,}.{rest:02d}"


def split_evenly(cents, people):
    """Shares that add up to the whole: the first ones get one cent more where it does not divide."""
    if people < 1:
        raise ValueError("nobody to split between")
    share, left = divmod(cents, people)
    return [share + 1 if number < left else share for number in range(people)]
