#include "attributes.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "log.h"

namespace redraft {

namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

struct Entry {
  const char *name;
  float Attributes::*real;
  int32_t Attributes::*integer;
};

constexpr Entry kEntries[kFields] = {
    {"scale", &Attributes::scale, nullptr},
    {"softcap", &Attributes::softcap, nullptr},
    {"window", nullptr, &Attributes::window},
    {"q_heads", nullptr, &Attributes::q_heads},
    {"kv_heads", nullptr, &Attributes::kv_heads},
    {"multiprocessors", nullptr, &Attributes::multiprocessors},
    {"compute_capability", nullptr, &Attributes::compute_capability},
};

bool read_integer(const PluginField &field, int32_t *to) {
  if (field.type == PluginFieldType::kINT32) {
    memcpy(to, field.data, sizeof *to);
    return true;
  }
  if (field.type != PluginFieldType::kINT64) {
    return refuse("field %s: expected an int32 or int64, found field type %d", field.name,
                  static_cast<int>(field.type));
  }
  int64_t value;
  memcpy(&value, field.data, sizeof value);
  if (value < INT_MIN || value > INT_MAX) {
    return refuse("field %s: expected a value of 32 bits, found %lld", field.name, static_cast<long long>(value));
  }
  *to = static_cast<int32_t>(value);
  return true;
}

bool read_field(const PluginField &field, const Entry &entry, Attributes *attributes) {
  if (!field.data || field.length != 1) {
    return refuse("field %s: expected one value, found %d", field.name, field.data ? field.length : 0);
  }
  if (entry.integer) return read_integer(field, &(attributes->*entry.integer));
  if (field.type != PluginFieldType::kFLOAT32) {
    return refuse("field %s: expected a float32, found field type %d", field.name, static_cast<int>(field.type));
  }
  memcpy(&(attributes->*entry.real), field.data, sizeof(float));
  return true;
}

bool check_values(const Attributes &attributes) {
  if (!isfinite(attributes.scale)) return refuse("scale: expected a finite number, found %g", attributes.scale);
  if (!(attributes.softcap >= 0.f)) return refuse("softcap: expected 0 or more, found %g", attributes.softcap);
  if (attributes.window < 0) return refuse("window: expected 0 or more, found %d", attributes.window);
  if (attributes.kv_heads < 1) return refuse("kv_heads: expected 1 or more, found %d", attributes.kv_heads);
  if (attributes.q_heads < 1 || attributes.q_heads % attributes.kv_heads != 0) {
    return refuse("q_heads: expected a multiple of kv_heads = %d, found %d", attributes.kv_heads, attributes.q_heads);
  }
  return true;
}

}  // namespace

Fields fields_of(const Attributes &attributes) {
  Fields fields;
  for (int i = 0; i < kFields; ++i) {
    const Entry &entry = kEntries[i];
    const void *value = entry.real ? static_cast<const void *>(&(attributes.*entry.real))
                                   : static_cast<const void *>(&(attributes.*entry.integer));
    fields[i] = PluginField(entry.name, value, entry.real ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32, 1);
  }
  return fields;
}

bool read_fields(const nvinfer1::PluginFieldCollection *collection, int needed, Attributes *attributes) {
  if (!collection || (collection->nbFields > 0 && !collection->fields))
    return refuse("fields: expected some, found none");
  bool found[kFields] = {};
  for (int i = 0; i < collection->nbFields; ++i) {
    const PluginField &field = collection->fields[i];
    int index = 0;
    while (index < kFields && (!field.name || strcmp(field.name, kEntries[index].name) != 0)) ++index;
    if (index == kFields) {
      return refuse("fields: expected scale, softcap, window, q_heads and kv_heads, found %s",
                    field.name ? field.name : "one without a name");
    }
    if (!read_field(field, kEntries[index], attributes)) return false;
    found[index] = true;
  }
  for (int index = 0; index < needed; ++index) {
    if (!found[index]) return refuse("fields: expected %s, which is missing", kEntries[index].name);
  }
  return check_values(*attributes);
}

}  // namespace redraft
