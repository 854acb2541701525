"""python -m tally BOOK.csv 2024-02 prints the report of one month."""

import sys
from pathlib import Path

from tally.ledger import Ledger
from tally.report import monthly_report


def main(arguments):
    """Print one report; the exit code is 2 where the arguments make no sense."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    book, month = arguments
    year, _, number = month.partition("-")
    ledger = Ledger.from_csv(Path(book).read_text(encoding="utf-8").splitlines())
    print(monthly_report(ledger, int(year), int(number)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
