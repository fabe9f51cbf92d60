"""Reads its standard input and writes a great deal."""

import sys

for line in sys.stdin:
    print("heard", line.strip())
    break
for number in range(100_000):
    print(f"line {number:6d} of many, and some more text to make it long")
sys.stdout.write("the end, without a new line")
