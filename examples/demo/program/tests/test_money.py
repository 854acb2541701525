import unittest

from tally.money import format_cents, parse_amount, split_evenly


class ParseAmount(unittest.TestCase):
    def test_whole_numbers_and_cents(self):
        self.assertEqual(parse_amount("12"), 1200)
        self.assertEqual(parse_amount("12.5"), 1250)
        self.assertEqual(parse_amount("1,234.50"), 123450)

    def test_spending_is_negative(self):
        self.assertEqual(parse_amount("-3"), -300)
        self.assertEqual(parse_amount("-12.34"), -1234)

    def test_less_than_one_unit_keeps_its_sign(self):
        self.assertEqual(parse_amount("-0.50"), -50)

    def test_blanks_around_the_number(self):
        self.assertEqual(parse_amount("  -7.25 "), -725)

    def test_nonsense_is_refused(self):
        for text in ("", "1.234.5", "12,34", "five", "--1"):
            with self.subTest(text=text), self.assertRaises(ValueError):
                parse_amount(text)

    def test_format_is_the_inverse(self):
        for cents in (0, 5, -5, 123450, -99, -100_000_001):
            with self.subTest(cents=cents):
                self.assertEqual(parse_amount(format_cents(cents)), cents)


class SplitEvenly(unittest.TestCase):
    def test_shares_add_up(self):
        self.assertEqual(split_evenly(1000, 3), [334, 333, 333])

    def test_nobody(self):
        with self.assertRaises(ValueError):
            split_evenly(100, 0)
