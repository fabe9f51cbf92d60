"""A random forest of scikit-learn, whose trees grow on the workers through joblib."""

import common

if __name__ == "__main__":
    common.need("sklearn")
    import joblib
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier

    options = common.start()
    rows, trees = options.pick(gpu=(20_000, 200), cpu=(2_000, 40))
    x, y = make_classification(rows, 20, n_informative=10, random_state=0)

    def run():
        forest = RandomForestClassifier(trees, random_state=0, n_jobs=-1)
        with joblib.parallel_config(backend="dask"):
            forest.fit(x, y)
        return forest

    options.measure(run, lambda forest: len(forest.estimators_) == trees)
