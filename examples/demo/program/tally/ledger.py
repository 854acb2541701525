"""Entries and the questions a report asks about them."""

import csv
from dataclasses import dataclass
from datetime import date, timedelta

from tally.money import parse_amount

FIELDS = ("date", "category", "amount", "note")


@dataclass(frozen=True)
class Entry:
    """One line of the book. Spending is negative, income positive."""

    day: date
    category: str
    cents: int
    note: str = ""


class Ledger:
    """Entries in the order of their days."""

    def __init__(self, entries=()):
        self.entries = sorted(entries, key=lambda entry: entry.day)

    @classmethod
    def from_csv(cls, lines):
        """Read lines of CSV with the header date,category,amount,note."""
        reader = csv.DictReader(lines)
        if tuple(reader.fieldnames or ()) != FIELDS:
            raise ValueError(f"expected the columns {', '.join(FIELDS)}")
        return cls(
            Entry(date.fromisoformat(row["date"]), row["category"], parse_amount(row["amount"]), row["note"])
            for row in reader
        )

    def in_month(self, year, month):
        """The part of the ledger that lies in one month."""
        first = date(year, month, 1)
        last = (first + timedelta(days=32)).replace(day=1) - timedelta(days=1)
        return Ledger(entry for entry in self.entries if first <= entry.day < last)

    def balance(self):
        """Income less spending, in cents."""
        return sum(entry.cents for entry in self.entries)

    def spending_by_category(self):
        """Cents spent per category, as positive numbers; income is left out."""
        totals = {}
        for entry in self.entries:
            if entry.cents < 0:
                totals[entry.category] = totals.get(entry.category, 0) - entry.cents
        return totals
