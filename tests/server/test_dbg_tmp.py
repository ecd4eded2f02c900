import sys, time, json
import numpy as np, pytest
from conftest import MODEL, metrics, total
from kvtier.client import Client, ServerError
from concurrent.futures import ThreadPoolExecutor
from test_cancel import cancelled, LONG, ENDLESS, running_and_queued
def test_x(tiny, client):
    for v in ({"text_input":"a","max_tokens": np.array([[4.0]], np.float32)},{"input_ids": np.array([[1, 2]], np.int64)}):
        with pytest.raises(ServerError) as c: list(client.infer(v, timeout_s=30))
        print("ERR", repr(c.value.status), c.value)
    before=cancelled(tiny)
    whole = {"text_input": "tell me", "stream": False, "max_tokens": LONG, "sampling_parameters": ENDLESS}
    def give_up(request):
        t=time.time()
        try: r=list(client.infer(request, timeout_s=1.0)); return "done", time.time()-t
        except ServerError as e: return e.status, str(e), time.time()-t
    print(give_up(whole)); time.sleep(2); print("c", cancelled(tiny)-before, running_and_queued(tiny))
    queued = [{"input_ids": [n] * 900, "max_tokens": 300, "sampling_parameters": ENDLESS} for n in (7, 8, 9)]
    with ThreadPoolExecutor(4) as pool:
        print(list(pool.map(give_up, [whole,*queued])))
    for _ in range(8):
        time.sleep(1); print("c", cancelled(tiny)-before, running_and_queued(tiny), metrics(tiny)["kvtier_requests_total"], metrics(tiny)["kvtier_request_failures_total"])
