"""An interval join: orders that are shipped within an hour, and, once the watermark has passed, those that are not."""

from feed import arrive, folder, show, stream_of

import gpu_ops

orders = stream_of("orders", "id INT, ordered_at TIMESTAMP").withWatermark("ordered_at", "5 minutes")
shipments = stream_of("shipments", "id INT, shipped_at TIMESTAMP").withWatermark("shipped_at", "5 minutes")
changes = gpu_ops.interval_join(
    orders,
    shipments,
    on="id",
    how="left",
    lower=0,
    upper="1 hour",
    late="tag",
    state=str(folder / "state"),
    name="shipping",
)
print(*gpu_ops.explain(changes).splitlines()[:3], sep="\n")

query = changes.writeStream.foreachBatch(show).option("checkpointLocation", str(folder / "checkpoint")).start()


def arrives(stream: str, column: str, *rows: tuple[int, str]) -> None:
    """A micro-batch of order numbers and times of 1 January 2026."""
    print(stream, *rows)
    arrive(stream, *({"id": number, column: f"2026-01-01T{time}:00Z"} for number, time in rows))
    query.processAllAvailable()


arrives("orders", "ordered_at", (1, "08:00"), (2, "08:10"))
arrives("shipments", "shipped_at", (1, "08:30"))
arrives("orders", "ordered_at", (3, "10:00"))
arrives("shipments", "shipped_at", (3, "10:15"))
arrives("shipments", "shipped_at", (2, "08:50"))  # no order is waiting for it any more: it is late
query.stop()
