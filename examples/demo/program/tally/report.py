"""The monthly report as text."""

import calendar

from tally.money import format_cents

WIDTH = 34


def largest(totals, limit):
    """The biggest categories, largest first, and one line "other" for all the rest."""
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    top, rest = ordered[:limit], ordered[limit + 1 :]
    if rest:
        top.append(("other", sum(cents for _, cents in rest)))
    return top


def percentages(totals):
    """Whole percentages that add up to 100: the largest fractions are rounded up."""
    whole = sum(cents for _, cents in totals)
    if not whole:
        return [0 for _ in totals]
    shares = [divmod(100 * cents, whole) for _, cents in totals]
    missing = 100 - sum(share for share, _ in shares)
    by_fraction = sorted(range(len(shares)), key=lambda index: -shares[index][1])
    raised = set(by_fraction[:missing])
    return [share + 1 if index in raised else share for index, (share, _) in enumerate(shares)]


def monthly_report(ledger, year, month, limit=3):
    """Title, one line per category with its share, and the balance of the month."""
    part = ledger.in_month(year, month)
    lines = [f"{calendar.month_name[month]} {year}".center(WIDTH).rstrip(), "=" * WIDTH]
    totals = largest(part.spending_by_category(), limit)
    for (category, cents), share in zip(totals, percentages(totals), strict=True):
        lines.append(f"{category:<14}{format_cents(cents):>14}{share:>5}%")
    lines.append("-" * WIDTH)
    lines.append(f"{'balance':<14}{format_cents(part.balance()):>14}")
    return "\n".join(lines)
