"""Routes by path, added with the same decorator as a FastAPI application's."""


class App:
    def __init__(self) -> None:
        self.routes = {}

    def get(self, path):
        def add(function):
            self.routes[path] = function
            return function

        return add


app = App()
