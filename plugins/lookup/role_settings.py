# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""All variables of a role as one dictionary, so that no task has to name each."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.lookup import LookupBase

from ..plugin_utils.role_specs import role_options

try:
    from ansible.template import trust_as_template
except ImportError:  # before ansible-core 2.19 every text was a template

    def trust_as_template(value: Any) -> Any:
        """The same."""
        return value


DOCUMENTATION = r"""
name: role_settings
short_description: The variables of a role of this collection as one dictionary
version_added: "0.1.0"
description:
  - Returns the value of each variable that the role's argument specification has, by its name without the role's, with
    the type that is given there.
  - A variable that nothing sets has its default, also where the role's defaults are not loaded.
options:
  _terms:
    description: Name of the role, without the collection's.
    type: list
    elements: str
    required: true
  without:
    description: Names of variables, without the role's, to leave out.
    type: list
    elements: str
    default: []
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Show what the role io_tuning will be asked for
  ansible.builtin.debug:
    msg: "{{ lookup('tunetool.node.role_settings', 'io_tuning') }}"
"""

RETURN = r"""
_list:
  description: The variables of each role, by name.
  type: list
  elements: dict
"""


class LookupModule(LookupBase):  # type: ignore[misc]  # Ansible ships no types
    """Reads the specification on the control machine."""

    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        """The variables of each role."""
        self.set_options(var_options=variables, direct=kwargs)
        without = self.get_option("without")
        return [self._settings(str(role), dict(variables or {}), without) for role in terms]

    def _settings(self, role: str, variables: dict[str, Any], without: list[str]) -> dict[str, Any]:
        try:
            spec = role_options(role)[role]
        except KeyError:
            raise AnsibleLookupError(f"the collection tunetool.node has no role `{role}`") from None
        # A path is of the node: it must not be expanded here.
        options = {
            name: {**option, "type": "str"} if option["type"] == "path" else option
            for name, option in spec.items()
            if name[len(role) + 1 :] not in without
        }
        defaults = {name: _template(option["default"]) for name, option in spec.items() if "default" in option}
        values = {**defaults, **variables}
        templar = self._templar.copy_with_new_env(available_variables=values)
        # Together: ansible-core 2.19 leaves a variable that is `omit` out then, as it does among a task's arguments.
        given = dict(templar.template({name: values[name] for name in options if name in values}))
        omitted = values.get("omit")  # before 2.19, what such a variable is
        given = {name: value for name, value in given.items() if omitted is None or value != omitted}
        validation = ArgumentSpecValidator(options).validate(given)
        if validation.error_messages:
            raise AnsibleLookupError(f"role {role}: {'; '.join(validation.error_messages)}")
        return {name[len(role) + 1 :]: value for name, value in validation.validated_parameters.items()}


def _template(default: Any) -> Any:
    """A default may be made from another variable."""
    return trust_as_template(default) if isinstance(default, str) else default
