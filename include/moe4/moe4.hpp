#pragma once
// moe4 runs NVFP4 Mixture-of-Experts layers natively, straight from checkpoint bytes.
#include "moe4/backend.hpp"
#include "moe4/checkpoint.hpp"
#include "moe4/error.hpp"
#include "moe4/grouped_tokens.hpp"
#include "moe4/layertest.hpp"
#include "moe4/moe.hpp"
#include "moe4/nvfp4.hpp"
#include "moe4/safetensors.hpp"
#include "moe4/tensor.hpp"
#include "moe4/version.hpp"
