"""scikit-learn on the cluster: a grid search whose fits run on the workers, through joblib.

pip install scikit-learn
mpirun -n 4 python -m hpcdask.run examples/grid_search.py
"""

import sys

import joblib
from distributed import Client
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.svm import SVC

GRID = {"C": [1, 10], "gamma": [1e-4, 1e-3, 1e-2]}

client = Client()
x, y = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x, y, random_state=0)
search = GridSearchCV(SVC(), GRID, cv=3)

# `scatter` sends the data to the workers once, instead of with every fit.
with joblib.parallel_config(backend="dask", scatter=[x_train, y_train]):
    search.fit(x_train, y_train)

accuracy = search.score(x_test, y_test)
n_workers = len(client.nthreads())
print(f"best of {len(search.cv_results_['params'])}: {search.best_params_}, on {n_workers} workers")
print(f"accuracy {accuracy:.3f}")
if search.best_params_ != {"C": 1, "gamma": 1e-3} or accuracy < 0.98:
    sys.exit("wrong: C=1 and gamma=0.001, with an accuracy above 0.98, were expected")
