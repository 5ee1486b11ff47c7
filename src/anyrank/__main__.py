"""`python -m anyrank` is `anyrank`."""

from anyrank.cli import main

main()
