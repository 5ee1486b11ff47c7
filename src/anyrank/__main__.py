"""`python -m anyrank` is `anyrank`."""

from anyrank.cli import main

if __name__ == "__main__":
    main(prog_name="anyrank")
