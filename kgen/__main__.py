"""`python -m kgen` is `kgen`."""

from kgen.cli.main import main

raise SystemExit(main())
