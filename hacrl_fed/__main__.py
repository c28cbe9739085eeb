"""``python -m hacrl_fed`` is the command ``hacrl-fed``."""

from hacrl_fed.cli import main

if __name__ == "__main__":
    main()
