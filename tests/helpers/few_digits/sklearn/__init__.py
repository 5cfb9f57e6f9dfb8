"""In the place of scikit-learn, for runs whose data are not what is tested."""
