/* Stand-in for the part of CANN's runtime whose answers torch_npu uses without a device.
 *
 * Everything else that the wheel links to is generated: functions that return 0, success.
 * Signatures are those of the public AscendCL headers (acl/acl_rt.h).
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

enum { DEVICES = 8 };

/* Streams, events and contexts are opaque: any pointers that differ will do. */
static int handle(void **out)
{
    static uintptr_t next = 0x1000;
    *out = (void *)(next += 16);
    return 0;
}

int aclrtGetDeviceCount(uint32_t *count)
{
    *count = DEVICES;
    return 0;
}

int aclrtGetDevice(int32_t *device)
{
    *device = 0;
    return 0;
}

const char *aclrtGetSocName(void) { return "Ascend910_9392"; } /* A3 */

const char *aclGetRecentErrMsg(void) { return "this is no CANN, but a stand-in for tests"; }

int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes)
{
    (void)kind;
    *free_bytes = *total_bytes = (size_t)64 << 30;
    return 0;
}

int aclrtGetCurrentContext(void **context) { return handle(context); }

int aclrtCreateStream(void **stream) { return handle(stream); }

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags)
{
    (void)priority, (void)flags;
    return handle(stream);
}

int aclrtCreateEventExWithFlag(void **event, uint32_t flags)
{
    (void)flags;
    return handle(event);
}
