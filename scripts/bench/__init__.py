"""What `scripts/bench_serving.py` is made of: arithmetic and report (which know no kvtier), and the runs themselves."""
