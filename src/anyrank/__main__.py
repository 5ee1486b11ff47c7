"""Entry point of `python -m anyrank`, the same as `anyrank`."""

from anyrank.cli import main

if __name__ == "__main__":
    main(prog_name="anyrank")
