/* Stand-in for libnvidia-ml.so.1. The file that NVML_STAND_IN names has the machine, one entry a line:
 *   init CODE            what nvmlInit_v2 returns
 *   driver VERSION
 *   gpu CODE UUID MIB [NAME]   a GPU; a CODE that is not 0 is returned for its handle. MIB of 0: memory is not
 *                        reported; without NAME its name is not
 *   mig UUID MIB         an instance of the last GPU; with UUID `none`, the GPU is partitioned and has none
 * Functions have the names, types and codes of NVIDIA's nvml.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
#define MOST 8

struct device {
    char uuid[96], name[96];
    unsigned long long mib;
    int code, has_mig;
    unsigned instances;
    struct device *instance[MOST];
};

static struct device *gpus[MOST];
static unsigned count;
static char driver[96];
static int initialized;

static struct device *device(int code, const char *uuid, unsigned long long mib) {
    struct device *made = calloc(1, sizeof *made);
    made->code = code;
    made->mib = mib;
    strcpy(made->uuid, uuid);
    return made;
}

int nvmlInit_v2(void) {
    FILE *file = fopen(getenv("NVML_STAND_IN"), "r");
    char line[256], uuid[96];
    unsigned long long mib;
    int code, result = SUCCESS;
    count = 0;
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "init %d", &result);
        sscanf(line, "driver %95s", driver);
        if (sscanf(line, "gpu %d %95s %llu", &code, uuid, &mib) == 3) {
            struct device *made = gpus[count++] = device(code, uuid, mib);
            sscanf(line, "gpu %*d %*s %*u %95[^\n]", made->name);
        }
        if (sscanf(line, "mig %95s %llu", uuid, &mib) == 2) {
            struct device *gpu = gpus[count - 1];
            gpu->has_mig = 1;
            if (strcmp(uuid, "none"))
                gpu->instance[gpu->instances++] = device(SUCCESS, uuid, mib);
        }
    }
    fclose(file);
    initialized = result == SUCCESS;
    return result;
}

int nvmlInit(void) { return nvmlInit_v2(); }

int nvmlShutdown(void) {
    initialized = 0;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case UNINITIALIZED: return "Uninitialized";
    case NOT_SUPPORTED: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    strncpy(text, driver, size);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *number) {
    *number = count;
    return initialized ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = gpus[index];
    return gpus[index]->code;
}

int nvmlDeviceGetUUID(struct device *gpu, char *text, unsigned size) {
    strncpy(text, gpu->uuid, size);
    return SUCCESS;
}

int nvmlDeviceGetName(struct device *gpu, char *text, unsigned size) {
    strncpy(text, gpu->name, size);
    return *gpu->name ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMemoryInfo(struct device *gpu, unsigned long long *sizes) {
    sizes[0] = gpu->mib << 20;
    return gpu->mib ? SUCCESS : NOT_SUPPORTED;
}

#ifndef BEFORE_MIG
int nvmlDeviceGetMigMode(struct device *gpu, unsigned *current, unsigned *pending) {
    *current = *pending = gpu->has_mig;
    return strncmp(gpu->uuid, "MIG-", 4) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *gpu, unsigned *number) {
    *number = gpu->has_mig ? MOST : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *gpu, unsigned index, void **handle) {
    if (index >= gpu->instances)
        return NOT_FOUND;
    *handle = gpu->instance[index];
    return SUCCESS;
}
#endif
