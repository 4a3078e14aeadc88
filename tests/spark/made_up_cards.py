"""CUDA's driver with made-up cards, for what asks it in a process of its own: `gpu_ops.spark.driver.machine`.

The host has eight cards of made-up names and memory, unless ``MADE_UP_CARDS`` says how many. As CUDA's does, it takes
of ``CUDA_VISIBLE_DEVICES`` what comes before the first entry that it does not know.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DRIVER = r"""
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
static int host(void) { const char* n = getenv("MADE_UP_CARDS"); return n ? atoi(n) : 8; }
static void identity(int card, unsigned char* bytes) { memset(bytes, 0xA0 + card, 16); }
static int visible[64], count;
static int known(const char* entry) {
  char *end, text[64], byte[3];
  long number = strtol(entry, &end, 10);
  if (*entry && !*end) return number >= 0 && number < host() ? (int)number : -1;
  for (int card = 0; card < host(); card++) {
    snprintf(byte, 3, "%02x", 0xA0 + card);
    snprintf(text, 64, "%s-%s%s%s%s", getenv("MADE_UP_SLICES") ? "MIG" : "GPU", byte, byte, byte, byte);
    if (!strncmp(entry, text, 12)) return card;
  }
  return -1;
}
int cuInit(unsigned flags) {
  if (getenv("MADE_UP_ERROR")) return atoi(getenv("MADE_UP_ERROR"));
  if (getenv("MADE_UP_CRASH")) abort();
  const char* given = getenv("CUDA_VISIBLE_DEVICES");
  count = 0;
  if (!given) { for (; count < host(); count++) visible[count] = count; }
  else {
    char* list = strdup(given);
    for (char* entry = strtok(list, ","); entry; entry = strtok(NULL, ",")) {
      while (*entry == ' ') entry++;
      if ((visible[count] = known(entry)) < 0) break;
      count++;
    }
  }
  return count ? 0 : 100;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == 100 ? "no CUDA-capable device is detected" : "made up";
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = getenv("MADE_UP_DRIVER") ? atoi(getenv("MADE_UP_DRIVER")) : 13010;
  return 0;
}
int cuDeviceGetCount(int* found) { *found = count; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 100 + ordinal; return 0; }
int cuDeviceGetName(char* name, int length, int device) {
  snprintf(name, length, "Card %d%s", visible[device - 100], getenv("MADE_UP_SLICES") ? " MIG 1g.10gb" : "");
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)(16 + visible[device - 100]) << 30; return 0; }
int cuDeviceGetUuid_v2(unsigned char* bytes, int device) { identity(visible[device - 100], bytes); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const char* given = getenv("MADE_UP_CAPABILITY");
  int found = given ? atoi(given) : 90;
  *value = attribute == 75 ? found / 10 : found % 10;
  return 0;
}
"""

LIBRARIES = ("cupy", "pylibcudf", "rmm")


def identity(card: int) -> str:
    """CUDA's name of a card."""
    byte = f"{0xA0 + card:02x}"
    return f"GPU-{byte * 4}-{byte * 2}-{byte * 2}-{byte * 2}-{byte * 6}"


def made_up_cards(folder: Path) -> dict[str, str]:
    """Variables with which a process finds the driver, and libraries that can be found and not be used."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    code = folder / "driver.c"
    code.write_text(DRIVER)
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", str(code), "-o", str(folder / "libcuda.so.1")], check=True)
    for name in LIBRARIES:
        (folder / f"{name}.py").write_text("raise ImportError('made up')")
    return {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}
