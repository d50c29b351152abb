// XXH3 (64 bits, seed 0) of the blocks of many tensors, by four threads for each block. gpu_sums.ptx is made from this by
// tools/dev/gpu_sums.py; gpu_sums.py says what the arguments are. The algorithm, for inputs of more than 240 bytes:
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
#define PRIME32_1 0x9E3779B1ULL
#define PRIME32_2 0x85EBCA77ULL
#define PRIME32_3 0xC2B2AE3DULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL

__device__ inline u64 secret_at(u32 byte) {
  u64 low = SECRET[byte >> 3];
  u32 shift = (byte & 7) * 8;
  return shift ? low >> shift | SECRET[(byte >> 3) + 1] << (64 - shift) : low;
}

__device__ inline void load(const u8* from, bool aligned, u64& first, u64& second) {
  if (aligned) {
    ulonglong2 both = __ldcs((const ulonglong2*)from);
    first = both.x;
    second = both.y;
    return;
  }
  first = second = 0;
  for (int i = 0; i < 8; i++) {
    first |= (u64)from[i] << (8 * i);
    second |= (u64)from[8 + i] << (8 * i);
  }
}

__device__ inline void accumulate(u64& first, u64& second, u64 data1, u64 data2, u64 secret1, u64 secret2) {
  u64 keyed1 = data1 ^ secret1, keyed2 = data2 ^ secret2;
  first += data2 + (u64)(u32)keyed1 * (keyed1 >> 32);
  second += data1 + (u64)(u32)keyed2 * (keyed2 >> 32);
}

// table: of each tensor its address, its bytes, the number of its first block, and the bytes of a block; the last block
// takes the rest. sums: one for each block.
extern "C" __global__ void sum_blocks(const u64* table, u32 tensors, u64 blocks, u64* sums) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u64 block = thread >> 2;
  u32 quarter = thread & 3;
  bool live = block < blocks;
  if (!live) block = blocks - 1;  // all threads of a warp take part in the shuffles

  u32 low = 0, high = tensors - 1;
  while (low < high) {
    u32 middle = (low + high + 1) / 2;
    if (table[4 * middle + 2] <= block) low = middle;
    else high = middle - 1;
  }
  const u64* tensor = table + 4 * low;
  u64 size = tensor[3], start = (block - tensor[2]) * size, left = tensor[1] - start;
  u64 length = left < 2 * size ? left : size;
  const u8* data = (const u8*)tensor[0] + start + 16 * quarter;
  bool aligned = ((u64)data & 15) == 0;

  u64 first = quarter == 0 ? PRIME32_3 : quarter == 1 ? PRIME64_2 : quarter == 2 ? PRIME64_4 : PRIME64_5;
  u64 second = quarter == 0 ? PRIME64_1 : quarter == 1 ? PRIME64_3 : quarter == 2 ? PRIME32_2 : PRIME32_1;
  u64 rounds = (length - 1) / 1024;
  for (u64 round = 0; round < rounds; round++, data += 1024) {
    u64 data1[16], data2[16];
#pragma unroll
    for (int i = 0; i < 16; i++) load(data + 64 * i, aligned, data1[i], data2[i]);
#pragma unroll
    for (int i = 0; i < 16; i++)
      accumulate(first, second, data1[i], data2[i], SECRET[i + 2 * quarter], SECRET[i + 2 * quarter + 1]);
    first = (first ^ first >> 47 ^ SECRET[16 + 2 * quarter]) * PRIME32_1;
    second = (second ^ second >> 47 ^ SECRET[17 + 2 * quarter]) * PRIME32_1;
  }
  u64 rest = length - 1 - 1024 * rounds, data1, data2;
  for (u32 i = 0; i < rest / 64; i++) {
    load(data + 64 * i, aligned, data1, data2);
    accumulate(first, second, data1, data2, SECRET[i + 2 * quarter], SECRET[i + 2 * quarter + 1]);
  }
  data = (const u8*)tensor[0] + start + length - 64 + 16 * quarter;
  load(data, ((u64)data & 15) == 0, data1, data2);
  accumulate(first, second, data1, data2, secret_at(121 + 16 * quarter), secret_at(129 + 16 * quarter));

  first ^= secret_at(11 + 16 * quarter);
  second ^= secret_at(19 + 16 * quarter);
  u64 sum = first * second ^ __umul64hi(first, second);
  sum += __shfl_xor_sync(0xffffffff, sum, 1);
  sum += __shfl_xor_sync(0xffffffff, sum, 2);
  if (!live || quarter != 0) return;
  sum += length * PRIME64_1;
  sum = (sum ^ sum >> 37) * PRIME_MX1;
  sums[block] = sum ^ sum >> 32;
}
