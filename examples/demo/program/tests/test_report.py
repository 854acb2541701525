import unittest
from datetime import date

from tally.ledger import Entry, Ledger
from tally.report import largest, monthly_report, percentages

TOTALS = {"rent": 90000, "food": 6000, "books": 2500, "bus": 1000, "coffee": 500}


class Largest(unittest.TestCase):
    def test_nothing_gets_lost(self):
        self.assertEqual(largest(TOTALS, 2), [("rent", 90000), ("food", 6000), ("other", 4000)])

    def test_no_other_when_all_fit(self):
        self.assertEqual(largest({"food": 5, "rent": 9}, 3), [("rent", 9), ("food", 5)])


class Percentages(unittest.TestCase):
    def test_they_add_up_to_100(self):
        self.assertEqual(percentages([("a", 1), ("b", 1), ("c", 1)]), [34, 33, 33])


class Report(unittest.TestCase):
    def test_a_month(self):
        ledger = Ledger(Entry(date(2024, 2, 10), name, -cents) for name, cents in TOTALS.items())
        text = monthly_report(ledger, 2024, 2, limit=3)
        self.assertIn("rent                  900.00   90%", text)
        self.assertIn("other                  15.00    1%", text)
        self.assertTrue(text.endswith("balance            -1,000.00"), text)


if __name__ == "__main__":
    unittest.main()
