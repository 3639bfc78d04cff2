"""`python -m sglang.launch_server` of the stand-in: serves until it is ended."""

import argparse
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sglang.model import Model
from sglang.srt.entrypoints.http_server import app

PARSER = argparse.ArgumentParser()
PARSER.add_argument("--model-path")
PARSER.add_argument("--host")
PARSER.add_argument("--port", type=int)
PARSER.add_argument("--enable-metrics", action="store_true")
PARSER.add_argument("--node-rank", type=int, default=0)
PARSER.add_argument("--json-model-override-args", type=json.loads)
PARSER.add_argument("--weights", type=int, default=0)
PARSER.add_argument("--faults", default="")


class Server(ThreadingHTTPServer):
    def fault(self, name: str) -> str:
        """The part after the colon of `name:value`, "" without that fault."""
        found = [f for f in self.faults if f.split(":")[0] == name]
        return found[0].partition(":")[2] if found else ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _json(self, data, status=200) -> None:
        self._send(status, json.dumps(data).encode(), "application/json")

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path in app.routes:
            self._json(app.routes[path]())
        elif path == "/health_generate":
            self._json({})
        elif path == "/metrics":
            text = "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 0.0\n"
            if "no-count" not in self.server.faults:
                text += "# TYPE sglang:num_retracted_reqs gauge\n"
                text += 'sglang:num_retracted_reqs{pid="1"} 0.0\n'
            if self.server.retracted:
                text += "# TYPE sglang:num_retracted_requests_total counter\n"
                text += f"sglang:num_retracted_requests_total {self.server.retracted}\n"
            self._send(200 if self.server.metrics else 404, text.encode(), "text/plain")
        elif path == "/server_info":
            self._json({"enable_hierarchical_cache": False})
        else:
            self._json({"error": path}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        if path == "/flush_cache":
            if "sticky-cache" not in self.server.faults:
                self.server.model.cache.clear()
            self._json({})
        elif path == "/generate":
            with self.server.lock:
                self._json(self._generate(json.loads(body)))
        else:
            self._json({"error": path}, 404)

    def _generate(self, body: dict) -> dict:
        server = self.server
        server.served += 1
        if os.path.exists(server.fault("die-while")) and server.served > 3:
            print("stand-in: dying on purpose", flush=True)
            # As a real server: the clients see the end before the parent does.
            server.socket.close()
            self.connection.shutdown(socket.SHUT_RDWR)
            time.sleep(2)
            os._exit(7)
        if "hang" in server.faults:
            time.sleep(3600)
        if "retract" in server.faults:
            server.retracted += 1
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        start = body.get("logprob_start_len")
        limit = len(ids) - 1 if start is None else start
        cached = server.model.cached(ids, limit)
        meta = {
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "cached_tokens": limit if "always-cached" in server.faults else cached,
            "num_retractions": 0,
        }
        if start is not None:
            meta["input_token_logprobs"] = server.model.score(ids, start)
        made = server.model.generate(ids, count)
        return {"text": " ".join(map(str, made)), "output_ids": made, "meta_info": meta}


def lose_port(host: str, port: int) -> None:
    """As SGLang: another socket has the port, and the way out waits for a warm-up."""
    import uvicorn

    async def warming(_scope, receive, send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        time.sleep(3600)

    with socket.create_server((host, port)):
        uvicorn.run(warming, host=host, port=port)


if __name__ == "__main__":
    arguments = PARSER.parse_args()
    fault, _, flag = arguments.faults.partition(":")
    if fault == "no-start" or fault == "no-start-while" and os.path.exists(flag):
        raise SystemExit("stand-in: refuses to start on purpose")
    if "lost-port" in arguments.faults:
        lose_port(arguments.host, arguments.port)
    if arguments.node_rank:
        while True:
            time.sleep(3600)
    http = Server((arguments.host, arguments.port), Handler)
    http.model = Model(arguments.weights, slots=64)
    http.faults = arguments.faults.split(",")
    if "writes-cache" in http.faults:
        cache = os.environ["SGLANG_CACHE_DIR"]
        open(os.path.join(cache, "written-by-engine.json"), "w").close()
    if folder := http.fault("spoils"):
        open(os.path.join(folder, "late.json"), "w").close()
    http.metrics = arguments.enable_metrics
    http.retracted = http.served = 0
    http.lock = threading.Lock()
    print(f"stand-in: model {arguments.model_path}", flush=True)
    http.serve_forever()
