import unittest
from datetime import date

from tally.ledger import Entry, Ledger

BOOK = """date,category,amount,note
2024-02-29,food,-41.20,"market, and bakery"
2024-02-01,rent,-900,
2024-02-14,food,-18.80,lunch
2024-02-28,salary,"2,500",
2024-03-01,food,-7.00,
""".splitlines()


class Months(unittest.TestCase):
    def test_first_and_last_day_belong_to_the_month(self):
        days = [entry.day.day for entry in Ledger.from_csv(BOOK).in_month(2024, 2).entries]
        self.assertEqual(days, [1, 14, 28, 29])

    def test_december(self):
        ledger = Ledger([Entry(date(2023, 12, 31), "fireworks", -2500), Entry(date(2024, 1, 1), "food", -100)])
        self.assertEqual(ledger.in_month(2023, 12).balance(), -2500)


class Totals(unittest.TestCase):
    def test_balance_of_everything(self):
        self.assertEqual(Ledger.from_csv(BOOK).balance(), 250000 - 90000 - 4120 - 1880 - 700)

    def test_spending_leaves_income_out(self):
        self.assertEqual(Ledger.from_csv(BOOK).spending_by_category(), {"rent": 90000, "food": 6700})

    def test_other_columns_are_refused(self):
        with self.assertRaises(ValueError):
            Ledger.from_csv(["day,amount", "2024-02-01,3"])
