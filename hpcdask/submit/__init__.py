"""``hpcdask submit``: one batch job for a whole allocation, in which the runner is started."""

#: How the tags of these jobs begin after ``hpcdask:``. No cluster's name has two dashes.
BATCH = "submit-"
